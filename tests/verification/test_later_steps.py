"""``verify(steps=3)``: later losses, parameters, buffers and an evaluation; and a loss near zero judged fairly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import OptionsError
from autopar.verification.later_steps import LaterSteps, compare_later
from autopar.verification.tolerance import Closeness


class Normed(nn.Module):
    """Batch statistics, a counter, and a buffer that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.relu(self.norm(self.first(x)))) * self.scale).square().mean()


def test_steps_compare_losses_parameters_buffers_and_an_evaluation() -> None:
    report = autopar.verify(Normed(), (2,), (torch.randn(8, 6),), steps=3)
    assert report.ok, str(report)
    assert report.steps == 3
    assert {
        "loss of step 2",
        "loss of step 3",
        "evaluation, output 0",
        "buffer norm.running_mean",
        "buffer norm.num_batches_tracked",
        "buffer scale",
        "parameter first.weight after 3 steps",
    } <= report.later_errors.keys()


@pytest.mark.slow
def test_steps_of_stages_and_of_random_numbers() -> None:
    stack = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    options = autopar.Options(stages=2, microbatches=2)
    report = autopar.verify(
        stack, (2,), (torch.randn(8, 6),), options=options, loss_fn=lambda y: y.square().mean(), steps=3
    )
    assert report.ok and report.draws, str(report)


def _later(**changed: torch.Tensor) -> LaterSteps:
    values = {"weight": torch.full((4,), 1.001), "mean": torch.ones(4), "count": torch.tensor(3), **changed}
    losses = (torch.tensor(1.0), values.get("loss", torch.tensor(0.9)))
    buffers = {"mean": values["mean"], "count": values["count"]}
    return LaterSteps(
        losses, buffers, {"weight": torch.ones(4)}, {"weight": values["weight"]}, {"0": torch.tensor(0.8)}
    )


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"weight": torch.full((4,), 1.0)}, "parameter weight after 2 steps"),
        ({"weight": torch.tensor([1.001, 1.001, 1.001, float("nan")])}, "parameter weight after 2 steps"),
        ({"mean": torch.full((4,), 1.0002)}, "buffer mean"),
        ({"count": torch.tensor(4)}, "buffer count"),
        ({"loss": torch.tensor(0.9001)}, "loss of step 2"),
    ],
)
def test_what_differs_is_named(changed: dict[str, torch.Tensor], name: str) -> None:
    asked = Closeness()
    assert all(error <= asked.tolerance for error in compare_later(_later(), _later(), None, asked).errors.values())
    found = compare_later(_later(**changed), _later(), None, asked)
    assert [n for n, error in found.errors.items() if not error <= asked.tolerance] == [name]


def test_a_loss_near_zero_counts_against_its_own_rounding() -> None:
    asked = Closeness()
    alone, exact = torch.tensor(1.0e-3), torch.tensor(1.0e-3 + 3e-8, dtype=torch.float64)
    assert asked.loss_error(alone + 4e-8, alone, exact) <= asked.tolerance
    assert asked.loss_error(alone + 4e-7, alone, exact) > asked.tolerance
    assert asked.loss_error(alone + 4e-8, alone, alone.double()) > asked.tolerance
    assert not asked.loss_error(torch.tensor(float("nan")), alone, exact) <= asked.tolerance


def test_steps_are_counted() -> None:
    with pytest.raises(OptionsError, match="steps=0"):
        autopar.verify(Normed(), (1,), (torch.randn(8, 6),), steps=0)
