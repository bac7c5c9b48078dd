"""Small models launch longer than they compute: stages with few microbatches, or one, may be quickest."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Layout, Options, Plan
from autopar.planner.step_graphs import pipelined_step_of
from autopar.search.attempts import beside, least_seconds
from autopar.search.division_bounds import bounds_of, estimates_of
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


@cache
def _planned(**options: Any) -> Plan:
    with torch.device("meta"):
        model, tokens = Small(), torch.zeros(12, 32, dtype=torch.int64)
    return autopar.plan(
        model, (6,), {"ids": tokens, "labels": tokens}, cluster="dgx-a100-80gb", options=Options(**options)
    )


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
