"""A scheduler that was made for another optimizer sets the rates of the one that replaced it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR, SequentialLR

from autopar.integrations.optimizers import point_to


def sequential(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 2), ExponentialLR(optimizer, 0.5)], [2])


def chained(optimizer: Any) -> Any:
    return ChainedScheduler([LinearLR(optimizer, 0.1, 1.0, 2), ExponentialLR(optimizer, 0.5)], optimizer)


@pytest.mark.parametrize("make", [sequential, chained])
def test_schedulers_made_of_others_follow(make: Any) -> None:
    before, wanted = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    scheduler, reference = make(before), make(wanted)
    options = [{key: value for key, value in group.items() if key != "params"} for group in before.param_groups]
    after = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], **options[0]}], lr=1.0)
    point_to(scheduler, after)
    for _ in range(6):
        assert after.param_groups[0]["lr"] == pytest.approx(wanted.param_groups[0]["lr"])
        for optimizer, each in ((after, scheduler), (wanted, reference)):
            optimizer.step()
            each.step()
