"""Private parts of torch, ortools and transformers have one home."""

from __future__ import annotations

from pathlib import Path

import pytest

from .private_parts import HOMES, uses_of_private_parts
from .sources import FOLDERS, ROOT

HOME = "autopar/torch_internals/hooks.py"
CODE = {
    "an import of a private module": "from torch._subclasses.fake_tensor import FakeTensor",
    "an import of a private name": "from torch.nn.modules.batchnorm import _BatchNorm",
    "an import of an undocumented module": "from torch.fx.experimental.proxy_tensor import make_fx",
    "an import in a function": "def f():\n    import functorch",
    "an import of ortools' internals": "from ortools.math_opt.core.python import solver",
    "an import of transformers' internals": "from transformers.masking_utils import _causal",
    "a private function": "import torch\ntorch._foreach_norm([])",
    "a private module by its path": "import torch\ntorch.utils._pytree.tree_map",
    "a private class by another name": "import torch as t\nt._ops.OpOverload",
    "a private attribute": "def f(tensor):\n    return tensor._local_tensor",
    "a private attribute of self": "class A:\n    def f(self):\n        return self._parameters",
    "a private attribute of what a call gives": "def f(x):\n    return x.untyped_storage()._cdata",
    "an attribute that is written": "def f(module):\n    module._modules = {}",
    "getattr": "def f(x):\n    return getattr(x, '_hidden', None)",
    "setattr as an argument": "def f(stack, x):\n    stack.callback(setattr, x, '_hidden', 1)",
    "a part of a name": "def f(x, kind):\n    return getattr(x, f'_global{kind}')",
    "a patch": "from unittest.mock import patch\npatch.object(None, '_hidden', 1)",
    "a private argument": "from torch.distributed.device_mesh import DeviceMesh\nDeviceMesh('cpu', [0], _rank=0)",
    "a name in quotes that a home reaches for": "KINDS = ('_forward_hooks',)",
}
ALLOWED = {
    "an operation": "import torch\ntorch.ops.aten._softmax.default",
    "an operation by our name for the namespace": "from .registry import aten\naten._softmax",
    "what a class here defines": "class A:\n    _x: int\n\n    def f(self, b):\n        self._y = b._x + b._y",
    "what a base class elsewhere defines": "class B(A):\n    def g(self):\n        self._defined + super()._method()",
    "a private argument of our own": "from dataclasses import replace\n\nclass A:\n    _x: int\n\nreplace(A(), _x=1)",
    "Python's own": "import os, sys\nos._exit(sys._getframe(1).f_lineno)",
    "special names": "def f(x):\n    return getattr(x, '__name__', x.__class__)",
    "suffixes": "def f(name):\n    return name.endswith('_bytes')",
    "our own modules": "from autopar.ir._x import y",
}


def uses_in(code: str, root: Path) -> list[str]:
    sources = {f"{folder}/__init__.py": "" for folder in FOLDERS}
    sources["cost/base.py"] = "class A:\n    _defined: int\n\n    def _method(self):\n        pass"
    sources[HOME] = "import torch._ops\nKIND = '_forward_hooks'\n\ndef f(x):\n    return x._anything"
    for name, text in (sources | {"passes/some.py": code}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return uses_of_private_parts(root)


def test_private_parts_are_used_in_their_homes_alone() -> None:
    assert uses_of_private_parts() == [], "give them a function in autopar/torch_internals or runtime/torch_internals"


def test_homes_exist() -> None:
    assert [home for home in HOMES if not (ROOT / home).exists()] == []


@pytest.mark.parametrize("case", CODE)
def test_a_private_part_is_found(case: str, tmp_path: Path) -> None:
    found = uses_in(CODE[case], tmp_path)
    assert len(found) == 1
    assert found[0].startswith("passes/some.py:")


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_not_private_is_left_alone(case: str, tmp_path: Path) -> None:
    assert uses_in(ALLOWED[case], tmp_path) == []
