"""What is estimated of stages is what those that are cut from the same placements take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from autopar.passes.pipeline.microbatch import microbatch, split_inputs
from autopar.planner.request import PlanRequest, folded_graph
from autopar.planner.step_graphs import pipelined_step_of
from autopar.search.fitting_schedules import PipelineSolution, cut_and_price
from autopar.search.pipeline_request import schedule_choices
from autopar.search.proposals.few_layer_step import FewLayerStep
from autopar.search.proposals.stage_programs import StagePrograms
from autopar.search.proposals.step_estimates import StepEstimates
from autopar.search.schedules.schedule_estimates import Arranged
from autopar.search.stage_meshes import StageLayout
from autopar.search.stage_prices.pipeline_breakdown import slowest_wire
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import Case, gpt2, llama
from tests.helpers.planning import requested, slow_devices

LAYERS = 6
SECTIONS = ("forward", "input_gradient", "weight_gradient", "whole_backward")
KINDS = tuple(schedule_choices(2, None, 2))


def _mlp() -> Case:
    return _Products(), {"x": torch.zeros(8, 64)}


class _Products(nn.Module):
    """Layers of two products around a stream."""

    def __init__(self) -> None:
        super().__init__()
        sides = [(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(nn.Sequential(up, nn.GELU(), down) for up, down in sides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        loss: torch.Tensor = x.square().mean()
        return loss


MODELS: dict[str, Callable[[], Case]] = {"mlp": _mlp, "llama": partial(llama, LAYERS), "gpt2": partial(gpt2, LAYERS)}


@dataclass(frozen=True)
class _Stages:
    """The placements of a microbatch on the ``tensor`` ranks of each of two stages."""

    request: PlanRequest
    step: FewLayerStep
    programs: StagePrograms
    tensor: int

    @property
    def layout(self) -> StageLayout:
        return StageLayout(2, (self.tensor,), (0,))

    @property
    def estimates(self) -> StepEstimates:
        (placed, *_) = self.programs.placed(self.tensor, 1)
        cluster = self.request.cluster
        costs = placed.costs(1).over(slowest_wire(cluster, self.layout.blocks))
        return StepEstimates([costs.segments] * 2, None, costs, cluster)

    def cuts(self, chunks: int) -> tuple[str, ...]:
        starts = self.estimates.costs.segments.starts
        return tuple(starts[len(starts) * at // chunks] for at in range(1, chunks))

    def cut(self, arranged: Arranged) -> PipelineSolution:
        """The pipeline itself."""
        (placed, *_) = self.programs.placed(self.tensor, 1)
        pieces = microbatch(self.step.graph, arranged.microbatches, split_inputs(self.request.graph))
        names = tuple(name.rpartition("+")[0] for name in self.cuts(2 * arranged.kind[1]))
        return cut_and_price(self.layout, pieces, names, arranged, (placed.solution,) * 2, self.request.cluster)


@cache
def _stages(model: str, tensor: int) -> _Stages:
    """Of all layers, on devices so slow that launches and messages hardly count."""
    request = requested(MODELS[model], (2, 2), slow_devices(), mesh_search=True, stages=None, microbatches=None)
    few = FewLayerStep.of(request)
    assert few is not None
    every = replace(few, graph=folded_graph(request, pipelined_step_of(request)), stacks=())
    return _Stages(request, every, StagePrograms(every), tensor)


@pytest.mark.parametrize(
    ("model", "tensor"),
    slow_rows_but([0, 2, 5], [("mlp", 1), ("mlp", 2), ("llama", 1), ("llama", 2), ("gpt2", 1), ("gpt2", 2)]),
)
def test_a_chunk_splits_backward_as_one_that_is_cut(model: str, tensor: int) -> None:
    own = _stages(model, tensor)
    for kind in (("zb-h1", 1), ("interleaved", 2)):
        arranged = Arranged(kind, (0, 1), 8)
        ours = own.estimates.prices(arranged, own.cuts(2 * kind[1])).chunks
        theirs = own.cut(arranged).breakdown.prices.chunks
        assert min(price.input_gradient for price in theirs[1:]) > 0.0 == theirs[0].input_gradient
        for estimated, cut in zip(ours, theirs, strict=True):
            for name in SECTIONS:
                assert getattr(estimated, name) == pytest.approx(getattr(cut, name), rel=1e-4), name


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_estimate_is_what_the_pipeline_takes(kind: tuple[str, int]) -> None:
    own, arranged = _stages("llama", 1), Arranged(kind, (0, 1), 8)
    estimated = own.estimates.seconds((arranged, own.cuts(2 * kind[1])))
    assert estimated == pytest.approx(own.cut(arranged).seconds, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_estimate_is_below_what_the_busiest_stage_computes(kind: tuple[str, int]) -> None:
    own = _stages("gpt2", 1)
    for count in (1, 2, 8, 64):
        arranged, cuts = Arranged(kind, (0, 1), count), own.cuts(2 * kind[1])
        prices, busy = own.estimates.prices(arranged, cuts), [0.0, 0.0]
        for rank, price in zip(arranged.placement, prices.chunks, strict=True):
            busy[rank] += price.forward + price.whole_backward
        around = sum(price.forward + price.input_gradient for price in prices.chunks)
        assert own.estimates.seconds((arranged, cuts)) >= max(count * max(busy), around)
