"""Operations on meta tensors are run once for all calls that are alike, and return what they would return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.runtime.rehearse.remembered_results import RememberedResults
from autopar.torch_internals.tensors import storage_key

aten: Any = torch.ops.aten


class Counted:
    """Calls an operation, and counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, raw = 0, type(aten.mm.default).__call__

        def counted(own: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return raw(own, *args, **kwargs)

        monkeypatch.setattr(type(aten.mm.default), "__call__", counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result), [described(part) for part in result]
    return (
        result if result is None else (result.shape, result.stride(), result.dtype, result.untyped_storage().nbytes())
    )


CALLS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "product": lambda: (aten.mm.default, (meta(4, 6), meta(6, 8))),
    "of a transposed": lambda: (aten.mm.default, (meta(6, 4).t(), meta(6, 8))),
    "elementwise": lambda: (aten.mul.Tensor, (meta(6, 4).t(), 2.0)),
    "several": lambda: (aten.native_layer_norm.default, (meta(4, 6), [6], meta(6), meta(6), 1e-5)),
    "list": lambda: (aten.cat.default, ([meta(2, 3), meta(4, 3)],)),
    "none among them": lambda: (
        aten.native_layer_norm_backward.default,
        (meta(4, 6), meta(4, 6), [6], meta(4, 1), meta(4, 1), meta(6), None, [True, True, False]),
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_like_another_returns_what_it_would(counted: Counted, call: Callable[[], Any]) -> None:
    results = RememberedResults()
    function, args = call()
    first = results.call(function, args, {})
    counted.calls = 0
    again = results.call(*call(), {})
    assert counted.calls <= 1  # The transposed operand is a call of its own.
    assert described(again) == described(first) == described(function(*call()[1]))
    tensors = [t for each in (first, again) for t in (each if isinstance(each, (tuple, list)) else [each])]
    own = [storage_key(t.untyped_storage()) for t in tensors if t is not None]
    assert len(set(own)) == len(own)


def test_calls_that_differ_are_told_apart() -> None:
    results = RememberedResults()
    counts = meta(4, dtype=torch.int64)
    for args in ((counts, 1), (counts, 1.0), (counts, True), (meta(5), 1), (meta(5, 4).t()[1], 1)) * 2:
        assert described(results.call(aten.mul.Tensor, args, {})) == described(aten.mul.Tensor(*args))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten.add_.Tensor, lambda: (meta(4), meta(4))),
        (aten.view.default, lambda: (meta(4, 2), [8])),
        (aten.split.Tensor, lambda: (meta(4, 2), 2)),
        (aten.dropout.default, lambda: (meta(4), 0.5, False)),
        (aten.mul.Tensor, lambda: (torch.ones(4), 2.0)),
        (aten.mul.Tensor, lambda: (meta(4), torch.ones(()))),
    ],
    ids=["in place", "view", "views", "the argument itself", "with data", "some data"],
)
def test_what_has_memory_of_an_argument_or_data_is_run(counted: Counted, function: Any, args: Any) -> None:
    results = RememberedResults()
    for _ in range(3):
        given = args()
        counted.calls = 0
        found = results.call(function, given, {})
        assert counted.calls >= 1
        tensors = found if isinstance(found, (tuple, list)) else [found]
        if function is not aten.mul.Tensor:
            keys = {storage_key(t.untyped_storage()) for t in tensors}
            assert keys == {storage_key(given[0].untyped_storage())}
        elif given[0].device.type == "cpu":
            assert found.tolist() == [2.0] * 4
