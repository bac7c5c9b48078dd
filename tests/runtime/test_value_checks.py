"""``Options(check_every=)``: replicas that differ and values that are not finite are named on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.helpers.marks import slow_but
from tests.helpers.planning import on


class Net(nn.Module):
    """``middle`` divides by the mean of ``divisor``, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(6, 8), Middle(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        return self.b(self.middle(self.a(x), divisor)).square().mean()


class Middle(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return nn.functional.dropout(x, 0.1) * (divisor / divisor)


X, FINE, BAD = torch.ones(4, 6), torch.ones(4, 1), torch.tensor([[1.0], [1.0], [1.0], [0.0]])


@pytest.mark.parametrize(
    "options", slow_but([{"zero": 3}], [{"zero": 0}, {"zero": 3}, {"stages": 2, "microbatches": 2}]), ids=str
)
def test_nan_is_named_and_skipped(options: dict[str, Any]) -> None:
    def work(rank: int, world: int) -> str:
        torch.manual_seed(0)
        models = {
            name: autopar.parallelize(
                Net(), (2,), options=autopar.Options(**options, check_every=1, nonfinite=name, seed=3)
            )
            for name in ("raise", "skip")
        }
        with pytest.raises(autopar.ValueFaultError) as raised:
            models["raise"].step(X, FINE)
            models["raise"].step(X, BAD)
        assert all(parameter.grad is None for parameter in models["raise"].parameters())
        model = models["skip"]
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        model.step(X, FINE)
        optimizer.step()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.zero_grad()
        assert model.step(X, BAD).isnan()
        optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.equal(_local(value), _local(before[name])), name
        assert model.step(X, FINE).isfinite()
        return str(raised.value)

    first, second = on(2, work)
    assert first == second
    assert first.startswith("step 2 computes values that are not finite") and "of module middle" in first
    assert "aten.div.Tensor" in first


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_backward_of_a_loss_is_checked(zero: int) -> None:
    """As ``step`` is: what is finite gives the same gradients, what is not is named, or skipped."""

    def work(rank: int, world: int) -> list[str]:
        def made(name: Any, every: int | None = 1) -> Any:
            torch.manual_seed(0)
            options = autopar.Options(zero=zero, stages=1, check_every=every, nonfinite=name, seed=3)
            return autopar.parallelize(Net(), (2,), options=options)

        plain, raising, skipping = made("raise", None), made("raise"), made("skip")
        for model in (plain, raising, skipping):
            model(X, FINE).backward()
        for models in zip(*(model.parameters() for model in (plain, raising, skipping)), strict=True):
            assert torch.equal(_local(models[0].grad), _local(models[1].grad))
            assert torch.equal(_local(models[0].grad), _local(models[2].grad))
        texts = []
        for x, divisor, factor in ((X, BAD, 1.0), (X * float("nan"), FINE, 1.0), (X, FINE, float("inf"))):
            with pytest.raises(autopar.ValueFaultError) as raised:
                (raising(x, divisor) * factor).backward()
            texts.append(str(raised.value))
        seen = skipping.get_buffer("middle.seen").clone()
        skipping(X, BAD).backward()  # What was accumulated is dropped too.
        assert all(parameter.grad is None for parameter in skipping.parameters())
        assert skipping.get_buffer("middle.seen") == seen
        skipping(X, FINE).backward()
        assert all(parameter.grad is not None for parameter in skipping.parameters())
        return texts

    first, second = on(2, work)
    assert first == second
    assert first[0].startswith("step 2 computes values that are not finite") and "of module middle" in first[0]
    assert (
        "in input 0 of the batch" in first[1] and "in the gradient that the loss outside of the model has" in first[2]
    )


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value  # type: ignore[no-any-return]


def test_replicas_that_differ_are_named() -> None:
    def work(rank: int, world: int) -> tuple[str, int]:
        options = autopar.Options(zero=0, check_every=2, mesh_search=False)
        model = autopar.parallelize(Net(), (3,), options=options)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        done = 0
        with pytest.raises(autopar.ValueFaultError) as raised:
            for step in range(6):
                model.step(X, FINE)
                done += 1
                if step != 2 or rank != 0:
                    optimizer.step()
                optimizer.zero_grad()
        copy.deepcopy(model)
        return str(raised.value), done

    results = on(3, work)
    assert results == results[:1] * 3
    text, done = results[0]
    assert done == 3, "skipped after the third, compared before the fourth"
    assert "rank 0 has other values than ranks 1, 2" in text and text.startswith("replicas of ")


def test_what_the_step_began_with_is_named() -> None:
    def work(rank: int, world: int) -> list[str]:
        model = autopar.parallelize(Net(), (2,), options=autopar.Options(zero=3, check_every=1))
        texts = []
        for x in (X, X * float("nan")):
            with pytest.raises(autopar.ValueFaultError) as raised:
                model.step(x, FINE)
                with torch.no_grad():
                    _local(model.get_parameter("b.bias")).fill_(float("inf"))
                model.step(x, FINE)
            texts.append(str(raised.value))
            with torch.no_grad():
                _local(model.get_parameter("b.bias")).fill_(0.0)
        return texts

    first, second = on(2, work)
    assert first == second
    assert "in the parameter b.bias, before the step" in first[0]
    assert "in input 0 of the batch" in first[1]
