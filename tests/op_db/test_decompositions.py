"""Every decomposition that tracing applies, torch's and ours, gives what the operation's own kernel gives."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("expecttest", reason="torch's own test data needs it")

import torch
from torch._C import DispatchKey
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.trace.decompositions.corrected import CORRECTED, corrected
from autopar.trace.decompositions.general import decomposition_table
from autopar.trace.decompositions.random import RANDOM

from .calls import calls
from .samples import MODULES, OPS, module_subjects, op_subjects
from .wrapped import OperatorCase

# What their results hold is whatever was in memory.
UNDEFINED = (
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_permuted.default",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
)
# What has no kernel on a CPU, or draws random numbers where it does anything.
NOT_HERE = (
    "aten.cudnn_batch_norm.default",
    "aten.cudnn_batch_norm_backward.default",
    "aten._fused_rms_norm_backward.default",
)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What tracing applies: our table, and what torch's dispatcher takes from Python in place of a kernel."""
    found: dict[Any, Callable[..., Any]] = {}
    for op in _overloads():
        if DispatchKey.Autograd in op.py_kernels:
            found[op] = op.py_kernels[DispatchKey.Autograd]
    table = {op: how for op, how in decomposition_table().items() if op not in RANDOM}
    return {**found, **table, **CORRECTED}


def _overloads() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from (getattr(packet, overload) for overload in packet.overloads())


class Beside(TorchDispatchMode):
    """Runs the decomposition of each operation beside its kernel; ``wrong`` says which differ."""

    def __init__(self, table: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table
        self.compared: Counter[str] = Counter()
        self.wrong: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        how = self.table.get(func)
        if how is None:
            return func(*args, **kwargs)
        given = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        result = func(*args, **kwargs)
        with torch.no_grad():
            self._compare(func, how(*given[0], **given[1]), result, args)
        return result

    def compare(self, func: Any, args: Any) -> None:
        """One call of an operation that may be taken apart."""
        if func in self.table:
            self._compare(func, self.table[func](*args), func(*args), args)

    def _compare(self, func: Any, found: Any, expected: Any, args: Any) -> None:
        if found is NotImplemented:
            return
        self.compared[str(func)] += 1
        pairs = zip(_tensors(found), _tensors(expected), strict=True)
        if not all(_is_close(a, b, _tolerance((args, expected)), str(func) in UNDEFINED) for a, b in pairs):
            self.wrong.setdefault(str(func), f"{_shown(args)}: {found} instead of {expected}"[:400])


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _tolerance(tensors: Any) -> float:
    """As the narrowest floating-point number among them allows."""
    leaves = [t for t in pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor)]
    narrow = min((torch.finfo(t.dtype).eps for t in leaves if t.dtype.is_floating_point or t.is_complex()), default=0.0)
    wide = max((torch.finfo(t.dtype).eps for t in leaves if t.dtype.is_floating_point or t.is_complex()), default=0.0)
    return max(1e-9, 100 * narrow, 8 * wide)


def _is_close(found: Any, expected: Any, tolerance: float, undefined: bool) -> bool:
    if expected is None or found is None:
        return True  # A gradient that nobody asked for: which of the two it is does not matter.
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return found.numel() == expected.numel() == 0  # Statistics that nobody asked for.
    return undefined or torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _shown(args: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: f"{t.dtype}{list(t.shape)}", args)


def _run(beside: Beside, case: OperatorCase) -> None:
    """Forward and backward of a sample."""
    torch.manual_seed(0)
    with beside:
        outputs = pytree.tree_leaves(case.model(*[x.clone() for x in case.inputs]))
        ends = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
        if ends:
            tangents = [torch.randn_like(end) for end in ends]
            torch.autograd.grad(ends, list(case.model.parameters()), tangents, allow_unused=True)


def _subjects(counts: dict[str, int]) -> Iterator[OperatorCase]:
    for kind, count in counts.items():
        for name in OPS:
            if "jiterator" not in name and name not in STORAGE:
                yield from op_subjects(name, kind, count)
        for name in MODULES:
            yield from module_subjects(name, kind, count)


# Their samples look at memory beyond the tensor that is given, of which a copy has none.
STORAGE = ("as_strided", "as_strided.partial_views", "as_strided_copy", "as_strided_scatter")


def _compared(counts: dict[str, int]) -> Beside:
    beside = Beside(decompositions())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in _subjects(counts):
            _run(beside, case)
        for op, args in calls():
            beside.compare(op, args)
    return beside


@pytest.mark.slow
def test_they_give_what_kernels_give() -> None:
    beside = _compared({"f64": 1})
    assert not beside.wrong, "\n".join(f"{op}{how}" for op, how in beside.wrong.items())


@pytest.mark.slow
def test_on_many_samples() -> None:
    beside = _compared({"f64": 40, "f32": 10, "c128": 40})
    assert not beside.wrong, "\n".join(f"{op}{how}" for op, how in beside.wrong.items())
    # What writes into given outputs is not traced: graphs are functional.
    traced = {op for op in beside.table if not any(argument.is_out for argument in op._schema.arguments)}
    never = set(map(str, traced)) - set(beside.compared) - set(NOT_HERE)
    assert not never, f"add calls of {sorted(never)} to tests/op_db/calls.py"


def test_what_is_mended_is_still_wrong() -> None:
    """Ours stand only where torch's differ: when a new torch has corrected one, it goes."""
    for op in CORRECTED:
        theirs = Beside({op: op.py_kernels[DispatchKey.Autograd]})
        for called, args in calls():
            theirs.compare(called, args)
        assert theirs.wrong, f"torch's decomposition of {op} is right by now: remove ours"


def test_torchs_own_stand_again_after_tracing() -> None:
    before = {op: op.py_kernels[DispatchKey.Autograd] for op in CORRECTED}
    with corrected():
        assert all(op.py_kernels[DispatchKey.Autograd] is CORRECTED[op] for op in CORRECTED)
    assert {op: op.py_kernels[DispatchKey.Autograd] for op in CORRECTED} == before
