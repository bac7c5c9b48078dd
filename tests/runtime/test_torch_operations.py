"""Functions of torch's that run instead of operations are those operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.execute.torch_operations import function_of, resolve_aten
from autopar.runtime.torch_internals.functions import FUNCTIONS

X, ROW, IMAGE = torch.rand(3, 3), torch.rand(3), torch.rand(2, 3, 4, 5)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "_log_softmax": ((X, 1, False), {}),
    "_native_batch_norm_legit": ((IMAGE, ROW, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5), {}),
    "_softmax": ((X, -1, False), {}),
    "addmm": ((ROW, X, X), {"beta": 2, "alpha": 0.5}),
    "bmm": ((X[None], X[None]), {}),
    "clone": ((IMAGE,), {"memory_format": torch.channels_last}),
    "convolution": ((IMAGE, torch.rand(2, 3, 1, 1), None, [1, 2], [1, 0], [1, 1], False, [0, 0], 1), {}),
    "mm": ((X, X), {}),
    "native_layer_norm": ((X, [3], None, ROW, 1e-5), {}),
    "permute": ((IMAGE, [0, -1, 1, 2]), {}),
    "relu": ((X - 0.5,), {}),
    "reshape": ((IMAGE, [-1, 10]), {}),
    "unsqueeze": ((X, -1), {}),
}


class _Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(f"{function}{[a for a in args if not isinstance(a, torch.Tensor)]}{kwargs}")
        return function(*args, **(kwargs or {}))


def test_every_function_has_a_call() -> None:
    assert sorted(f"aten.{name}.default" for name in CALLS) == sorted(FUNCTIONS)


@pytest.mark.parametrize("name", CALLS)
def test_a_function_is_the_operation_that_it_stands_for(name: str) -> None:
    operation = resolve_aten(f"aten.{name}.default")
    function, (args, kwargs) = function_of(operation), CALLS[name]
    assert function is not operation
    reached, results = [], []
    for call in (operation, function):
        with torch.no_grad(), _Called() as called:
            results.append(call(*args, **kwargs))
        reached.append(called.names)
    assert reached[0] == reached[1] and reached[0]
    tuples = [result if isinstance(result, tuple) else (result,) for result in results]
    for expected, found in zip(*tuples, strict=True):
        assert torch.equal(expected, found) and expected.stride() == found.stride()


def test_other_operations_are_themselves() -> None:
    operation = resolve_aten("aten.threshold_backward.default")
    assert function_of(operation) is operation
    assert function_of(len) is len
