"""Rehearsals of few layers tell what a step of many holds, and guide the search for one that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.passes.annotate.fold import fold_layers
from autopar.placement.placed_step import PlacedStep
from autopar.planner import peaks as measuring
from autopar.planner.mesh_solution import MeshSolution, peak_bytes
from autopar.planner.peaks import Peaks
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.steps import short_rehearsal
from autopar.planner.steps.short_rehearsal import ShortGraphs, estimated_peak, short_graphs
from autopar.planner.timings import Timings
from tests.helpers.models import Case, llama
from tests.helpers.planning import requested
from tests.passes.test_omit_layers import deep


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).tanh())
        return y


class Turns(nn.Module):
    """Layers of two sizes that take turns."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(64 if i % 2 else 192) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = x.square().mean()
        return loss


def turns() -> Case:
    return Turns(24), {"x": torch.randn(64, 64)}


def turns_of_many_rows() -> Case:
    """Whose products have tiles for all processors: what memory costs is then more than the gap of solving."""
    return Turns(24), {"x": torch.randn(4096, 64)}


def two_stacks() -> Case:
    """An encoder beside another, of other depths."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Turns(24), Turns(30)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.one(x) + self.other(x.tanh())
            return loss

    return Both(), {"x": torch.randn(64, 64)}


class Skips(Turns):
    """The outputs of all layers are read after the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return torch.stack(found).square().mean()


def skips() -> Case:
    return Skips(24), {"x": torch.randn(64, 64)}


def wide() -> Case:
    """Activations are most of what it holds: the program counts more than that."""
    return Turns(24), {"x": torch.randn(1024, 64)}


def graph_of(request: PlanRequest) -> Graph:
    return step_graph(request.graph, request.loss, request.batch)


def solved(request: PlanRequest) -> MeshSolution:
    return solve_mesh(request, graph_of(request), Timings())[0]


def within(request: PlanRequest, share: float) -> PlanRequest:
    """``request`` with a share of the memory that it needs without a limit."""
    limit = int(share * peak_bytes(solved(request)))
    return replace(request, options=replace(request.options, memory_limit=limit))


def limit_of(request: PlanRequest) -> int:
    assert request.options.memory_limit is not None
    return request.options.memory_limit


@pytest.fixture
def estimating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of small graphs are estimated too."""
    monkeypatch.setattr(measuring, "LEAST_NODES", 0)
    monkeypatch.setattr(short_rehearsal, "LEAST_BUCKETS", 0)


@pytest.mark.usefixtures("estimating")
@pytest.mark.parametrize("model", [turns, two_stacks])
def test_few_layers_tell_what_many_hold(model: Callable[[], Case]) -> None:
    free = requested(model, (2,), offload=False)
    for request in (free, within(free, 0.75)):
        best = solved(request)
        short = short_graphs(best.instance.graph)
        assert short is not None and len(short.base) < 0.75 * len(best.instance.graph)
        assert estimated_peak(measuring._plain(best), short) == peak_bytes(best)


@pytest.mark.usefixtures("estimating")
def test_a_transformer_is_estimated_within_a_few_hundredths() -> None:
    best = solved(requested(partial(llama, 14), (2,), offload=False, recompute="full"))
    short = short_graphs(best.instance.graph)
    assert short is not None and best.assignment.recomputed
    assert estimated_peak(measuring._plain(best), short) == pytest.approx(peak_bytes(best), rel=0.03)


def test_where_all_layers_are_read_at_once_all_are_rehearsed() -> None:
    best = solved(requested(skips, (2,)))
    assert short_graphs(best.instance.graph) is None
    peaks = Peaks(requested(skips, (2,)))
    assert peaks.about(best) == peak_bytes(best)


def test_fewer_steps_are_rehearsed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    request = within(requested(turns_of_many_rows, (2,), offload=False), 0.6)
    measured: list[MeshSolution] = []

    def measure(found: MeshSolution) -> int:
        measured.append(found)
        return peak_bytes(found)

    monkeypatch.setattr(measuring, "peak_bytes", measure)
    assert peak_bytes(solved(request)) <= limit_of(request)
    all_rehearsed = len(measured)
    measured.clear()
    monkeypatch.setattr(measuring, "LEAST_NODES", 0)
    monkeypatch.setattr(short_rehearsal, "LEAST_BUCKETS", 0)
    assert peak_bytes(solved(request)) <= limit_of(request)
    assert len(measured) < all_rehearsed


@pytest.mark.usefixtures("estimating")
@pytest.mark.parametrize("share", [0.7, 1.0, 1.05])
@pytest.mark.parametrize("error", [0.7, 1.1])
def test_a_wrong_estimate_costs_rounds_and_no_memory(
    error: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimates that are far too low, or a tenth too high: what is chosen fits, as measured, and is not slower. Where
    the quickest fits, it is chosen."""
    request = within(requested(wide, (2,), offload=False), share)
    right = solved(request)

    def wrong(step: PlacedStep, short: ShortGraphs) -> int:
        estimate = estimated_peak(step, short)
        assert estimate is not None
        return int(error * estimate)

    monkeypatch.setattr(measuring, "estimated_peak", wrong)
    best = solved(request)
    assert peak_bytes(best) <= limit_of(request)
    assert best.solution.objective <= (1.02 if share < 1.0 else 1.0) * right.solution.objective


def test_gradients_that_one_bucket_holds_are_not_estimated() -> None:
    """Of 24 small layers the gradients of all are in one bucket; those of few are too."""
    best = solved(requested(turns, (2,), offload=False))
    short = short_graphs(best.instance.graph)
    assert short is not None and estimated_peak(measuring._plain(best), short) is None


@pytest.mark.parametrize("period", [1, 3, 4, 6])
@pytest.mark.parametrize("layers", [36, 37, 49])
def test_turns_of_any_length_are_shortened(period: int, layers: int) -> None:
    short = short_graphs(fold_layers(Graph.from_text(deep(layers, turns=period))))
    assert short is not None
    (longer, times) = short.longer[0]
    per_layer = (len(longer) - len(short.base)) * times
    assert len(short.base) + per_layer == len(Graph.from_text(deep(layers, turns=period)))


def test_a_stack_that_is_read_outside_keeps_its_layers_and_others_do_not() -> None:
    """Experts that are read together, beside a deep stack."""

    class Mixed(Skips):
        def __init__(self) -> None:
            super().__init__(12)
            self.deep = Turns(24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = super().forward(x) + self.deep(x)
            return loss

    best = solved(requested(lambda: (Mixed(), {"x": torch.randn(64, 64)}), (2,), offload=False))
    short = short_graphs(best.instance.graph)
    assert short is not None and len(short.longer) == 1
    assert sum(node.module.startswith("layers.") for node in short.base.nodes) == sum(
        node.module.startswith("layers.") for node in best.instance.graph.nodes
    )
