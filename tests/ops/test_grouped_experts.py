"""Grouped products of experts compute what products expert by expert do. (torch's kernel for processors computes the
same as that for GPUs; only on GPUs it is taken.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ops import exchanged_experts, experts, grouped_experts
from autopar.ops.exchanged_experts import EXCHANGES, run_lockstep

from .test_exchanged_experts import ROUTERS, block, on_device

BIASES = {"with biases": True, "without": False}


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grouped products on processors too; how often a block asked whether it may use them."""
    asked: list[int] = []

    def can_group(rows: Tensor, up: Tensor, down: Tensor) -> bool:
        asked.append(len(rows))
        return True

    for module in (experts, exchanged_experts):
        monkeypatch.setattr(module, "can_group", can_group)
    return asked


def operands(router: str, biases: bool, count: int = 4, chosen: int = 2) -> list[Any]:
    made = list(block(count, chosen, router, torch.float32, width=8, hidden=12))
    return made if biases else [*made[:5], None, None, *made[7:]]


def near(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biases", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("first", "held"), [(0, 4), (1, 2), (3, 1)])
def test_some_experts(router: str, biases: bool, first: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, weights, *matrices, act, count = operands(router, biases)
    here = [None if each is None else each[first : first + held] for each in matrices]
    given = (x, ids, weights, *here, act, count, first)
    expected = experts.experts(*given), *experts.experts_backward(x.cos(), *given)
    monkeypatch.setattr(experts, "can_group", lambda *_: True)
    near((experts.experts(*given), *experts.experts_backward(x.cos(), *given)), expected)


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_that_exchange(router: str, grouped: list[int]) -> None:
    given = operands(router, biases=True)
    grad, starts = given[0].cos(), range(0, 4, 2)
    parts = [on_device(index, 2, tuple(given)) for index in range(2)]
    found = run_lockstep([EXCHANGES["exchanged_experts"](*part, starts) for part in parts])
    near((torch.cat(found),), (experts.experts(*given, 0),))
    calls = zip(grad.chunk(2), parts, strict=True)
    backward = run_lockstep([EXCHANGES["exchanged_experts_backward"](g, *part, starts) for g, part in calls])
    whole = experts.experts_backward(grad, *given, 0)
    near([torch.cat(each) for each in zip(*backward, strict=True)], whole)
    assert len(grouped) == 6, "each device and the whole, forward and backward"


def test_gradients_lie_in_memory_as_their_matrices_do(grouped: list[int]) -> None:
    """Compiled code around the operation relies on the strides of its fake results: some models store matrices
    transposed, and a token or a weight may be a view."""
    x, ids, weights, up, down, *rest = operands("each to the next", biases=False)
    x, weights, up, down = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (x, weights, up, down))
    given = (x, ids, weights, up, down, *rest, 0)
    found = experts.experts(*given), *experts.experts_backward(x.cos(), *given)
    for result, like in zip(found, (x, x, weights, up, down), strict=False):
        assert result.stride() == torch.empty_like(like).stride()
    assert len(grouped) == 2


def test_processors_and_other_dtypes_go_expert_by_expert() -> None:
    x, _, _, up, down, *_ = operands("each to the next", biases=False)
    assert not grouped_experts.can_group(x, up, down)
    assert not grouped_experts.can_group(*(each.bfloat16() for each in (x, up, down)))
