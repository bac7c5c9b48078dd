"""Small models launch longer than they compute: stages with few microbatches, or one, may be quickest."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Layout, Options, Plan
from autopar.errors import InfeasibleError
from autopar.planner.step_graphs import pipelined_step_of
from autopar.search.attempts import beside, least_seconds
from autopar.search.candidate import Candidate
from autopar.search.division_bounds import bounds_of, estimates_of
from autopar.search.pipelines import _Pipeline
from autopar.search.stage_meshes import layout_for
from tests.helpers.planning import requested

GAP = 1.01  # Of each solve, Options.gap.


class Small(nn.Module):
    """Residual blocks of odd widths, over a table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1009, 48)
        self.ups = nn.ModuleList(nn.Linear(48, 120) for _ in range(6))
        self.downs = nn.ModuleList(nn.Linear(120, 48) for _ in range(6))
        self.head = nn.Linear(48, 1009)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _texts(samples: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(samples, 32, dtype=torch.int64)
    return {"ids": tokens, "labels": tokens}


def _plan(model: nn.Module, batch: dict[str, torch.Tensor], mesh: tuple[int, ...], **options: Any) -> Plan:
    return autopar.plan(model, mesh, batch, cluster="dgx-a100-80gb", options=Options(**options))


@cache
def _planned(**options: Any) -> Plan:
    return _plan(Small(), _texts(12), (6,), **options)


def _seconds(**options: Any) -> float:
    return _planned(**options).predicted.step_seconds


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_a_number_of_stages_is_as_quick_as_with_a_number_of_microbatches(stages: int) -> None:
    fixed = [_seconds(stages=stages, microbatches=count) for count in (1, 2, 3, 6)]
    assert _seconds(stages=stages) <= GAP * min(fixed)


def test_a_free_search_is_as_quick_as_restricted_ones() -> None:
    free = _seconds()
    assert free <= GAP * min(_seconds(stages=stages, microbatches=1) for stages in (2, 3, 6))
    assert free <= GAP * _seconds(layout=Layout(pipeline=3))


def test_operations_too_small_for_a_device_are_expected_to_shrink_no_further() -> None:
    request = requested("stack", (2, 2), mesh_search=True, stages=None, microbatches=None)
    graph = pipelined_step_of(request)
    bounds, estimates, layout = bounds_of(request, graph), estimates_of(request, graph), layout_for((2, 2), 2)
    assert layout is not None and estimates.smaller is not None and bounds.smaller is None
    for count in (1, 2, 4):
        assert estimates.expected(layout.blocks, count) >= least_seconds(request, graph, layout)(count)


def test_numbers_of_microbatches_beside_the_quickest_are_those_next_to_it_that_could_win() -> None:
    request = requested("stack", (2, 2), mesh_search=True, stages=None, microbatches=None)
    graph, layout = pipelined_step_of(request), layout_for((2, 2), 2)
    assert layout is not None
    assert set(beside(request, graph, layout, 2, 1.0, 1.0)) <= {1, 4}
    assert beside(request, graph, layout, 2, 1.0, 0.0) == ()
    assert beside(request, graph, layout, 2, math.inf, 1.0) == (), "it is no use beside what is hopeless"


@pytest.mark.parametrize("samples", [2, 3])
def test_with_few_samples_a_single_microbatch_is_tried(samples: int) -> None:
    def seconds(**options: Any) -> float:
        return _plan(Small(), _texts(samples), (4,), stages=4, **options).predicted.step_seconds

    assert seconds() <= GAP * seconds(microbatches=1)


def test_more_microbatches_than_fewer_that_do_not_fit_are_tried() -> None:
    """Of seven samples in eight stages, no number is as large as that of stages."""

    def plan(**options: Any) -> Plan:
        return _plan(Small(), _texts(7), (8,), stages=8, **options)

    whole, singles = plan(microbatches=1).predicted, plan(microbatches=7).predicted
    limit = (whole.peak_bytes + singles.peak_bytes) // 2
    assert singles.peak_bytes < limit < whole.peak_bytes
    assert plan(memory_limit=limit).predicted.peak_bytes <= limit


class Quarters(nn.Module):
    """Divides by a quarter of its samples, of which two have none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * (1.0 / (x.shape[0] // 4))
        return x.square().mean()


def test_models_that_do_not_hold_for_few_samples_are_planned() -> None:
    assert _plan(Quarters(), {"x": torch.zeros(16, 32)}, (4,)).batch == 16
    assert _plan(Quarters(), {"x": torch.zeros(16, 32)}, (4,), stages=2).stages == 2


class Normed(nn.Module):
    """A batch norm, which takes no microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.norm(self.before(x)).relu()).square().mean()


@pytest.mark.parametrize("stages", [None, 2])
def test_no_pipeline_is_solved_twice(monkeypatch: pytest.MonkeyPatch, stages: int | None) -> None:
    tried, solve = list[tuple[object, int]](), _Pipeline.solved

    def noted(sought: _Pipeline, *args: Any) -> Candidate:
        tried.append((sought.layout, sought.microbatches))
        return solve(sought, *args)

    monkeypatch.setattr(_Pipeline, "solved", noted)
    for model, batch in ((Normed(), {"x": torch.zeros(12, 16)}), (Small(), _texts(12))):
        tried.clear()
        _plan(model, batch, (2,), stages=stages)
        assert tried and len(set(tried)) == len(tried)


def test_of_whole_steps_both_neighbours_are_tried_whatever_is_expected() -> None:
    request = requested("stack", (2,), stages=None, microbatches=None)
    graph, layout = pipelined_step_of(request), layout_for((2,), 1)
    assert layout is not None and request.batch == 8
    assert beside(request, graph, layout, 2, 1.0, 1.0) == (4,), "one microbatch is a plan without"
    assert beside(request, graph, layout, 4, 1.0, 1.0) == (2, 8)
    assert beside(request, graph, layout, 4, 1.0, 0.0) == ()


def test_a_number_that_divides_samples_unevenly_hides_none_that_does_not() -> None:
    """Of 12 samples on 2 devices: 4 microbatches have 3 samples each, 6 have 2."""
    request = replace(requested("stack", (2,), stages=None, microbatches=None), batch=12)
    layout = layout_for((2,), 1)
    assert layout is not None
    assert beside(request, pipelined_step_of(request), layout, 3, 1.0, 1.0) == (2, 4, 6)


class Head(nn.Module):
    """A layer below a table of words that holds most of what a step does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20011, 64), nn.Linear(64, 64), nn.Linear(64, 20011, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.tanh(self.mix(self.embed(ids))))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.slow
def test_within_memory_no_number_of_microbatches_is_quicker() -> None:
    free = _plan(Head(), _texts(12), (2,)).predicted.peak_bytes

    def seconds(part: float, count: int | None) -> float:
        try:
            options = {"memory_limit": int(part * free), "microbatches": count}
            return _plan(Head(), _texts(12), (2,), **options).predicted.step_seconds
        except InfeasibleError:
            return math.inf

    for part in (0.7, 0.5):
        assert seconds(part, None) <= GAP * min(seconds(part, count) for count in (2, 3, 4, 6))
