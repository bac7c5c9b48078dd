"""Segments hold what the chunks that are cut between them do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.node import VIEWS, Value
from autopar.passes.pipeline.cut_candidates import cut_candidates
from autopar.planner.step_graphs import pipelined_graph
from autopar.search import fitting_schedules
from autopar.search.fitting_schedules import PipelineSolution, cut_and_price
from autopar.search.schedules.cuts import Segments
from autopar.search.segments import price_segments, segment_of_nodes
from tests.helpers.models import Case, llama
from tests.helpers.planning import planned, requested


def _layers() -> Case:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    return _WithLoss(model), {"x": torch.zeros(16, 32)}


class _WithLoss(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


@pytest.mark.parametrize("zero", [0, 2])
def test_what_rests_is_known_before_anything_is_cut(monkeypatch: pytest.MonkeyPatch, zero: int) -> None:
    found: list[Segments] = []
    solutions: list[PipelineSolution] = []

    def segments_of(*arguments: Any) -> Segments:
        found.append(price_segments(*arguments))
        return found[-1]

    def priced(*arguments: Any) -> PipelineSolution:
        solutions.append(cut_and_price(*arguments))
        return solutions[-1]

    monkeypatch.setattr(fitting_schedules, "price_segments", segments_of)
    monkeypatch.setattr(fitting_schedules, "cut_and_price", priced)
    # Gradients are sums over data ranks, and more than their shards is held while microbatches add to them.
    planned(_layers, (4, 2), stages=4, microbatches=4, schedule="1f1b", zero=zero)
    (segments,) = found
    memories = [breakdown.memory for breakdown in solutions[-1].breakdown.breakdowns]
    resting = sum(memory.weights + memory.gradients + memory.optimizer for memory in memories)
    assert segments.static.sum() == resting
    assert sum(memory.gradients for memory in memories) > 0


def test_every_operation_is_in_the_segment_where_it_runs() -> None:
    request = requested(partial(llama, 6), (2,))
    graph = pipelined_graph(request.graph, request.loss, request.batch)
    segments = segment_of_nodes(graph, cut_candidates(graph))
    computed = [node for node in graph.nodes if not node.is_placeholder]
    assert all(node.name in segments for node in computed)
    # Views are repeated wherever they are read, and belong to the layer that reads them first.
    views = [
        node
        for node in computed
        if node.op in VIEWS and node.phase == "forward" and node.path.startswith("model.layers.")
    ]
    assert len({segments[node.name] for node in views}) >= 6
    for node in views:
        readers = [reader.name for reader, _ in graph.users.get(Value(node.name), ()) if reader.phase == "forward"]
        assert all(segments[node.name] <= segments[reader] for reader in readers)
        assert not readers or segments[node.name] > 0 or ".0." in node.path


class Flips(nn.Module):
    """Layers that end in a view, which only the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), Flip()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


class Flip(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_layers_that_end_in_a_view_can_be_pinned_to_neighbouring_stages(first: int) -> None:
    pins = {f"h.{first}": "stage 0", f"h.{first + 1}": "stage 1"}
    plan = planned(lambda: (Flips(), {"x": torch.zeros(16, 16)}), (2,), stages=2, schedule="gpipe", pins=pins)
    assert plan.stages == 2
