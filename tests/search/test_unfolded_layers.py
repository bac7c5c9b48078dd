"""What segments of few layers cost, unfolded to all layers, is what those of all layers cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autopar.planner.request import PlanRequest, folded_graph
from autopar.planner.step_graphs import pipelined_step_of
from autopar.search.proposals.few_layer_step import FewLayerStep
from autopar.search.proposals.stage_costs import PlacedStage
from autopar.search.proposals.stage_programs import StagePrograms
from autopar.search.stage_prices.chunk_price import SECTIONS
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import Case, gpt2, llama
from tests.helpers.planning import requested

LAYERS = 12
# Within the usual gap, programs of few and of all layers may choose another placement of the head.
GAP = 1e-3


def _request(kind: str) -> PlanRequest:
    make = {"gpt2": gpt2, "llama": llama}[kind]
    open_search = {"mesh_search": True, "stages": None, "microbatches": None}
    return requested(lambda: make(LAYERS), (2, 2), gap=GAP, **open_search)


def _placed(step: FewLayerStep, tensor: int) -> tuple[PlacedStage, ...]:
    return tuple(StagePrograms(step).placed(tensor, 1))


@pytest.mark.parametrize(("kind", "tensor"), slow_rows_but([0], [("llama", 2), ("gpt2", 1)]))
def test_few_layers_unfold_to_all(kind: str, tensor: int) -> None:
    request = _request(kind)
    few = FewLayerStep.of(request)
    assert few is not None and few.stacks and 2 * len(few.graph) < len(pipelined_step_of(request))
    every = replace(few, graph=folded_graph(request, pipelined_step_of(request)), stacks=())
    short, whole = _placed(few, tensor), _placed(every, tensor)
    assert len(short) == len(whole) > 1, "the quickest, and the same with more and more recomputed"
    for own, of_all in zip(short, whole, strict=True):
        ours, theirs = own.costs(2), of_all.costs(2)
        for name in ("seconds", "static", "saved", "wire", "working", "again"):
            np.testing.assert_allclose(
                getattr(ours.segments, name), getattr(theirs.segments, name), rtol=1e-9, err_msg=name
            )
        for section in SECTIONS:
            np.testing.assert_allclose(ours.sections[section], theirs.sections[section], rtol=1e-9)
        np.testing.assert_allclose(ours.reduce, theirs.reduce, rtol=1e-9)
        np.testing.assert_allclose(ours.update, theirs.update, rtol=1e-9)
        assert ours.weights == theirs.weights


def test_sections_are_all_that_a_microbatch_takes() -> None:
    few = FewLayerStep.of(_request("llama"))
    assert few is not None
    for placed in _placed(few, 2):
        costs = placed.costs(2)
        np.testing.assert_allclose(sum(costs.sections.values()), costs.segments.seconds, rtol=1e-9)


def test_recomputing_more_saves_less_and_takes_longer() -> None:
    few = FewLayerStep.of(_request("llama"))
    assert few is not None
    totals = [placed.costs(2).totals for placed in _placed(few, 2)]
    assert sorted(totals, key=lambda each: each.seconds) == totals
    assert sorted(totals, key=lambda each: -each.saved) == totals
    assert totals[0].saved > totals[-1].saved


def _without_layers() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.product(x).square().mean()
            return loss

    return Model(), {"x": torch.zeros(8, 8)}


def test_a_model_without_layers_has_no_few_layer_step() -> None:
    assert FewLayerStep.of(requested(_without_layers, (2, 2))) is None
