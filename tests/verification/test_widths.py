"""The other floating-point width of models that insist on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.description import Cluster
from autopar.verification.steps import Task, one_process
from autopar.verification.widths import converted, default_dtype, in_width, insisting
from tests.helpers.planning import CLUSTER


class Insistent(nn.Module):
    """A bias of keys in attention, whose gradient is zero but for rounding, and casts to float32 by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).mT
        if self.how == "least":  # In float64 it is infinite once it is converted, and rows of it have no softmax.
            least = torch.full(scores.shape, torch.finfo(scores.dtype).min).float()
            scores = torch.where(torch.arange(5)[:, None] > 0, scores, least)
        if self.how == "method":
            scores = scores.float().softmax(-1).float()
        if self.how == "argument":
            scores = scores.softmax(-1, dtype=torch.float32)
        if self.how == "default":
            scores = scores.softmax(-1) @ torch.eye(5)
        value = self.value(x).to(torch.float32) if self.how == "least" else self.value(x)
        return (scores @ value).tanh().square().sum()


def _task(model: nn.Module, x: torch.Tensor) -> Task:
    return Task(model, (1,), (x,), None, autopar.Options(seed=0), Cluster.get(CLUSTER), None, None)


@pytest.mark.parametrize("how", ["least", "method", "argument", "default"])
def test_models_that_insist_on_float32_have_their_step_in_float64(how: str) -> None:
    """Whose bias of keys has a gradient of 1e-17."""
    alone, exact = one_process(_task(Insistent(how), torch.randn(4, 5, 6)), 60.0)
    assert exact is not None and bool(exact.loss.isfinite())
    assert {gradient.dtype for gradient in exact.gradients.values()} == {torch.float64}
    assert float((exact.loss - alone.loss).abs() / alone.loss) < 1e-6
    if how != "least":
        assert float(exact.gradients["key.bias"].abs().max()) < 1e-14


def test_models_that_insist_on_float64_have_their_step_in_float32() -> None:
    class Doubles(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x).tanh() @ torch.ones(3, 1, dtype=torch.float64)).sum()

    alone, exact = one_process(_task(Doubles(5, 3).double(), torch.randn(4, 5).double()), 60.0)
    assert exact is not None and exact.gradients["weight"].dtype == torch.float32
    assert 0.0 < float((exact.loss - alone.loss).abs() / alone.loss.abs()) < 1e-5


def test_requests_are_answered_with_one_width() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with insisting():
        made = [x.half(), x.to(torch.bfloat16), torch.zeros(2, dtype=torch.float32), torch.zeros(2), x.type(torch.half)]
        assert {value.dtype for value in made} == {torch.float64}
        assert x.to(torch.complex64).dtype == torch.complex128 and x.long().dtype == torch.int64
        assert x.to(dtype=torch.float32, copy=True).dtype == torch.float64 and torch.tensor(1).dtype == torch.int64
    assert torch.get_default_dtype() == torch.float32
    with insisting(double=False):
        made = [x.double(), x.to(torch.float64), torch.ones(1), torch.zeros(1, dtype=torch.float64)]
        assert {value.dtype for value in made} == {torch.float32}
    assert torch.zeros(1, dtype=torch.half).dtype == torch.float16


def test_values_are_converted_with_complex_ones() -> None:
    assert converted(torch.zeros(1, dtype=torch.complex64)).dtype == torch.complex128
    assert converted(torch.zeros(1, dtype=torch.complex128), double=False).dtype == torch.complex64
    assert converted(torch.zeros(1, dtype=torch.int32)).dtype == torch.int32 and converted("text") == "text"
    assert in_width(torch.bool) == torch.bool and in_width(torch.float64, double=False) == torch.float32
    with pytest.raises(KeyError), default_dtype(torch.float64):
        raise KeyError
    assert torch.get_default_dtype() == torch.float32
