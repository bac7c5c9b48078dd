"""Checks of values that only raise are left out of a graph, whatever way they are written; what else depends on values
is an error. Plain numbers that a model changes are warned of where later calls would find them changed."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.tracer import trace
from tests.helpers.eager import assert_close
from tests.helpers.interpret import interpret
from tests.helpers.value_checks import (
    Checked,
    asserts,
    asserts_of_numbers,
    both,
    called,
    computes,
    continues,
    either,
    otherwise,
    raises,
    raises_unless,
    returns_early,
)  # fmt: skip

CHECKS = (raises, raises_unless, either, both, asserts, asserts_of_numbers, otherwise, continues)


class Guarded(nn.Module):
    def __init__(self, check: Checked) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(4, 4), check

    def forward(self, x: Tensor) -> Tensor:
        return self.check(self.layer(x), True).square().mean()


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_is_left_out_and_said(check: Checked) -> None:
    model, x = Guarded(check).double(), torch.randn(3, 4).double()
    traced = trace(model, (x,), device="cpu")
    (name,) = (node.target for node in traced.graph.placeholders("input"))
    graph = traced.graph.at(b=3) if traced.graph.symbols else traced.graph
    found = interpret(graph, {**dict(model.named_parameters()), name: x})
    assert traced.signature.loss is not None
    assert_close("loss", found["output", traced.signature.loss], model(x).detach(), 0.0)
    assert all("value_checks.py:" in note and "checks values" in note for note in traced.notes)
    assert len(traced.notes) == (2 if check in (asserts, asserts_of_numbers) else 1)


@pytest.mark.parametrize("check", [returns_early, computes, called])
def test_other_conditions_are_errors(check: Checked) -> None:
    with pytest.raises(TraceError, match=r"value_checks.py:\d+"):
        trace(Guarded(check), (torch.randn(3, 4),), device="cpu")


class Variational(nn.Module):
    """Distributions check their arguments by values."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 6), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.encode(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, scale.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        likelihood = torch.distributions.Laplace(self.decode(posterior.rsample()), 1.0)
        return (torch.distributions.kl_divergence(posterior, prior).sum(-1) - likelihood.log_prob(x).sum(-1)).mean()


def test_distributions_are_traced() -> None:
    traced = trace(Variational(), (torch.randn(3, 4),), device="cpu")
    assert not traced.notes and traced.graph.symbols


class Numbered(nn.Module):
    """Has a number in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(4, 4), 3

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Fits(Numbered):
    """As blocks that make their window no wider than the picture."""

    def forward(self, x: Tensor) -> Tensor:
        self.number = min(self.number, 1)
        return self.layer(x).roll(self.number, -1).square().mean()


class Counts(Numbered):
    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.layer(x).square().mean()


class SetsAfterwards(Numbered):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.number
        self.number = 1
        return y.square().mean()


class SetsATensorAfterwards(Numbered):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * torch.tensor(float(self.number))
        self.number = 1
        return y.square().mean()


class SetsALongTensorAfterwards(Numbered):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).repeat(1, 32) * torch.tensor([float(self.number)] * 128)
        self.number = 1
        return y.square().mean()


class PicksBeforeItSets(Numbered):
    """The same operations, of another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = [self.layer(x), self.layer(x + 1), self.layer(x + 2), self.layer(x + 3)][self.number]
        self.number = 1
        return y.square().mean()


class ScaledGradient(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class ScalesGradientsBeforeItSets(Numbered):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = ScaledGradient.apply(self.layer(x), float(self.number))
        self.number = 1
        return y.square().mean()


class Remembers(Numbered):
    """Has a container, and a number that follows from what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.state = {"calls": 0}
        self.last: deque[int] = deque(maxlen=9)
        self.nested: list[list[int]] = [[]]

    def remember(self) -> int:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.number = self.remember()
        return (self.layer(x) * self.number).square().mean()


class CountsAList(Remembers):
    def remember(self) -> int:
        self.seen.append(0)
        return len(self.seen)


class CountsANewList(Remembers):
    def remember(self) -> int:
        self.seen = [*self.seen, 0]
        return len(self.seen)


class CountsInADict(Remembers):
    def remember(self) -> int:
        self.state["calls"] += 1
        return self.state["calls"]


class CountsADeque(Remembers):
    def remember(self) -> int:
        self.last.append(0)
        return len(self.last)


class CountsOnceInAList(Remembers):
    """A list in a list."""

    def remember(self) -> int:
        if not self.nested[0]:
            self.nested[0].append(0)
            return 1
        return 2


class SetsOnceInAList(Remembers):
    """Only the very first call changes the number."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.number
        if not self.nested[0]:
            self.nested[0].append(0)
            self.number = 1
        return y.square().mean()


class FitsAndRemembers(Remembers):
    """The number does not follow from what it remembers."""

    def remember(self) -> int:
        self.seen.append(0)
        self.state["calls"] += 1
        return min(self.number, 1)


class SetsForEvaluation(Numbered):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.number = 2
        return (self.layer(x) * (1 + self.number)).square().mean()


WARNED = (
    Counts,
    SetsAfterwards,
    SetsATensorAfterwards,
    SetsALongTensorAfterwards,
    PicksBeforeItSets,
    ScalesGradientsBeforeItSets,
    SetsForEvaluation,
    CountsAList,
    CountsANewList,
    CountsInADict,
    CountsADeque,
    CountsOnceInAList,
    SetsOnceInAList,
)


@pytest.mark.parametrize("kind", WARNED)
def test_numbers_that_later_calls_would_find_changed_are_warned_of(kind: type[Numbered]) -> None:
    model = nn.Sequential(nn.Identity(), kind())
    with pytest.warns(UserWarning, match=r"changes 1\.number(, 1\.\w+)? when it is called.*register_buffer"):
        trace(model, (torch.randn(3, 4),), device="cpu")
    assert model[1].number == 3


class CountsOnlyInAList(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(0)
        return (self.layer(x) * len(self.seen)).square().mean()


class CountsInAnObject(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.object = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.object.calls += 1
        return (self.layer(x) * self.object.calls).square().mean()


class Counter:
    calls = 0


class KeepsATensor(Numbered):
    """Replaces a plain tensor that it read."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + 1
        return (self.layer(x) * self.total).square().mean()


class FitsAnObject(Remembers):
    """As models that find out once what kind of labels they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.object = Counter()

    def forward(self, x: Tensor) -> Tensor:
        if self.object.calls == 0:
            self.object.calls = 4
        return (self.layer(x) * self.object.calls).square().mean()


KEPT = ((CountsOnlyInAList, "1.seen"), (CountsInAnObject, "1.object.calls"), (KeepsATensor, "1.total"))


@pytest.mark.parametrize(("kind", "path"), KEPT)
def test_what_is_kept_elsewhere_is_warned_of(kind: type[Numbered], path: str) -> None:
    with pytest.warns(UserWarning, match=f"changes {path} when it is called"):
        trace(nn.Sequential(nn.Identity(), kind()), (torch.randn(3, 4),), device="cpu")


def test_what_a_model_remembers_is_put_back() -> None:
    model = CountsADeque()
    with pytest.warns(UserWarning, match="changes number"):
        trace(model, (torch.randn(3, 4),), device="cpu")
    assert not model.last and model.last.maxlen == 9


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [Fits, FitsAndRemembers, FitsAnObject])
def test_numbers_that_are_fitted_before_they_are_used_are_not(kind: type[Numbered], training: bool, grad: bool) -> None:
    trace(kind(), (torch.randn(3, 4),), device="cpu", training=training, grad=grad)
