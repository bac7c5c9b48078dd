"""Near a limit of memory: what fits is found, microbatches are tried without stages, and words say what holds."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import InfeasibleError, Options
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.step_graphs import pipelined_step_of
from autopar.planner.timings import Timings
from autopar.search.attempts import attempts
from autopar.search.candidate import Candidate, why_excluded
from autopar.search.pipelines import _Pipeline, with_stages
from tests.helpers.planning import CLUSTER, requested

LIMIT = 150_000


class Perceptron(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        hidden = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.l = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.l(x)
        return y.pow(2).mean()


def plan(**options: object) -> autopar.Plan:
    settings = Options(**options)  # type: ignore[arg-type]
    return autopar.plan(Perceptron(), (2, 2), (torch.randn(64, 128),), cluster=CLUSTER, options=settings)


def test_steps_that_hold_less_than_what_counts_least_are_found() -> None:
    """The step of which the program counts least holds 172,560 bytes."""
    found = plan(memory_limit=LIMIT, stages=1, microbatches=1)
    assert found.predicted.peak_bytes <= LIMIT


@pytest.mark.slow
def test_an_error_names_a_limit_that_is_enough() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(memory_limit=66_000, stages=1, microbatches=1)
    message = str(caught.value)
    named = re.search(r"Options\(memory_limit=(\d+)\)", message)
    assert named is not None and 66_000 < int(named[1]) < LIMIT
    assert "less state" not in message, "all of it rests in host memory"
    assert plan(memory_limit=int(named[1]), stages=1, microbatches=1).predicted.peak_bytes <= int(named[1])


@pytest.mark.parametrize("lacks_memory", [False, True])
def test_microbatches_are_tried_without_stages_where_memory_is_short(lacks_memory: bool) -> None:
    request = requested("stack", (2,), mesh_search=True, stages=None, microbatches=None)
    tried = list(attempts(request, pipelined_step_of(request), 1.0, lacks_memory))
    whole = [counts for layout, counts in tried if layout.stages == 1]
    assert bool(whole) == lacks_memory
    assert all(count > 1 for counts in whole for count in counts)


def test_a_step_in_microbatches_leaves_work_for_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much work it takes to solve: every program takes half of what is left."""
    tried, timings = list[int](), Timings()

    def solved(own: _Pipeline, timings: Timings, best: float) -> Candidate:
        tried.append(own.layout.stages)
        for _ in range(2):  # Placements, and those that hold less.
            timings.solving += 0.5 * timings.left(own.request.options)
        return Candidate(1.0 / len(tried), own.layout, _never, _never)

    monkeypatch.setattr(_Pipeline, "solved", solved)
    request = requested("stack", (2, 2), mesh_search=True, stages=None, microbatches=None)
    with_stages(request, {}, timings, math.inf, lacks_memory=True)
    assert tried[:3] == [1, 1, 1] and {2, 4} <= set(tried)


def test_a_step_in_microbatches_that_is_given_up_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def solved(own: _Pipeline, timings: Timings, best: float) -> Candidate:
        if own.layout.stages == 1:
            raise TooSlowError(own.name, 2.0, is_proven=False)
        return Candidate(1.0, own.layout, _never, _never)

    monkeypatch.setattr(_Pipeline, "solved", solved)
    request = requested("stack", (2,), mesh_search=True, stages=None, microbatches=None)
    found, _ = with_stages(request, {}, Timings(), 1.5, lacks_memory=True)
    assert why_excluded(found, LIMIT) == {"no stages x (2,), 2 microbatches": "about 2 s"}


def _never() -> Any:
    raise AssertionError("not asked for")


def test_options_that_exclude_a_baseline_are_its_reason() -> None:
    text = str(plan(zero=3))
    assert re.search(r"data parallel +excluded +no placements under zero=3", text)
    assert "no such placements" not in text


@pytest.mark.parametrize("nothing_fits", [True, False])
def test_where_nothing_fits_single_samples_are_tried_at_last(nothing_fits: bool) -> None:
    request = requested(lambda: (Perceptron(), (torch.randn(64, 128),)), (2,), stages=1, microbatches=None)
    best = math.inf if nothing_fits else 1.0
    ((_, counts),) = attempts(request, pipelined_step_of(request), best, lacks_memory=True)
    assert counts == ((2, 4, 8, 64) if nothing_fits else (2, 4, 8))
