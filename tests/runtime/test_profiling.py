"""Traces of ``torch.profiler`` name calls, modules, instructions and actions of pipelines."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autopar
from tests.helpers.planning import on


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(self.first(x).relu()), y)


def traced(options: autopar.Options) -> list[tuple[list[str], bool]]:
    """Of two ranks: the path of names around each event of a step, and whether the step gave the same as before."""

    def work(rank: int, world: int) -> tuple[list[str], bool]:
        source = torch.Generator().manual_seed(0)
        batch = torch.randn(8, 6, generator=source), torch.randint(0, 4, (8,), generator=source)
        model = autopar.parallelize(Net(), (2,), options=options)
        losses, gradients = [], []
        for recording in (False, True):
            model.zero_grad()
            trace = profile(activities=[ProfilerActivity.CPU], acc_events=True) if recording else None
            with trace or nullcontext():
                losses.append(float(model.step(*batch)))
            gradients.append([model.full_tensor(p.grad) for p in model.parameters() if p.grad is not None])
        same = losses[0] == losses[1] and all(map(torch.equal, *gradients))
        paths = list[str]()
        assert trace is not None
        for event in trace.events():
            names, parent = [event.name], event.cpu_parent
            while parent is not None:
                names.append(parent.name)
                parent = parent.cpu_parent
            paths.append(" / ".join(reversed(names)))
        return paths, same

    return on(2, work)


def test_modules_and_instructions_are_ranges() -> None:
    for paths, same in traced(autopar.Options(zero=3, stages=1, timeout=60)):
        assert same
        inside = [path.split(" / ") for path in paths]
        products = [path for path in inside if path[-1] in ("aten::addmm", "aten::mm") and len(path) == 4]
        assert ["model.step()", "forward first"] in [path[:2] for path in products], "\n".join(paths)
        assert all(path[2].startswith("%") for path in products)
        assert ["model.step()", "backward second"] in [path[:2] for path in products]
        assert any(name.startswith("%") and name.endswith("collective.all_gather") for path in inside for name in path)


@pytest.mark.slow
def test_actions_of_pipelines_are_ranges() -> None:
    results = traced(autopar.Options(stages=2, microbatches=2, timeout=60))
    assert all(same for _, same in results)
    for (paths, _), chunk in zip(results, "01", strict=True):
        assert any(path.startswith(f"model.step() / F{chunk}.1 / forward") for path in paths), "\n".join(paths)
