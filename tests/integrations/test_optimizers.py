"""A scheduler that was made for another optimizer sets the rates of the one that replaced it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR, SequentialLR

from autopar.integrations.optimizers import point_to

from .small_models import nested, together


def sequential(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 2), ExponentialLR(optimizer, 0.5)], [2])


def chained(optimizer: Any) -> Any:
    return ChainedScheduler([LinearLR(optimizer, 0.1, 1.0, 2), ExponentialLR(optimizer, 0.5)], optimizer)


@pytest.mark.parametrize("make", [sequential, chained, nested])
def test_schedulers_made_of_others_follow(make: Any) -> None:
    before, wanted = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    scheduler, reference = make(before), make(wanted)
    options = [{key: value for key, value in group.items() if key != "params"} for group in before.param_groups]
    after = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], **options[0]}], lr=1.0)
    point_to(scheduler, after)
    for _ in range(9):
        assert after.param_groups[0]["lr"] == pytest.approx(wanted.param_groups[0]["lr"])
        for optimizer, each in ((after, scheduler), (wanted, reference)):
            optimizer.step()
            each.step()


def prepared_rates(rank: int, world: int, folder: Path) -> tuple[list[float], list[float]]:
    """Those of five steps under AutoparAccelerator, and of the last three again."""
    from autopar.integrations.accelerate import AutoparAccelerator

    def new() -> Any:
        accelerator, model = AutoparAccelerator(cpu=True), torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return accelerator, *accelerator.prepare(model, optimizer, nested(optimizer))

    def step(accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> float:
        accelerator.backward(model(torch.ones(2, 1)).sum())
        optimizer.step()
        scheduler.step()
        return float(optimizer.param_groups[0]["lr"])

    first, again, rates = new(), new(), []
    for at in range(5):
        if at == 2:
            first[0].save_state(str(folder))
        rates.append(step(*first))
    step(*again)
    again[0].load_state(str(folder))
    return rates, [step(*again) for _ in range(3)]


def test_nested_schedules_are_prepared_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs Accelerate: pip install 'autopar[hf]'")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, wanted = nested(optimizer), []
    for _ in range(5):
        optimizer.step()
        for _ in range(2):  # As Accelerate steps for two processes.
            scheduler.step()
        wanted.append(optimizer.param_groups[0]["lr"])
    rates, again = together(2, prepared_rates, tmp_path)
    assert rates == pytest.approx(wanted)
    assert again == pytest.approx(wanted[2:])
