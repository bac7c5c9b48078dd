"""Of deep models, few layers say which pipelines cannot be quicker than the best plan: these are not searched for."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.passes.pipeline.microbatch import microbatch, split_inputs
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.planner.request import PlanRequest
from autopar.planner.step_graphs import pipelined_step_of
from autopar.planner.timings import Timings
from autopar.search import pipelines
from autopar.search.attempts import attempts
from autopar.search.pipelines import _Pipeline, with_stages
from autopar.search.rounds import inner_repeats
from autopar.search.stage_problems import SAFETY_FACTOR, StagePrograms
from tests.helpers.models import Case, gpt2
from tests.helpers.planning import requested

LAYERS = 12


@pytest.fixture(autouse=True)
def _every_model_is_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "MANY_OPERATIONS", 0)


def _request(**options: Any) -> PlanRequest:
    return requested(
        partial(gpt2, LAYERS), (4,), **{"mesh_search": True, "stages": None, "microbatches": None} | options
    )


def _pipeline(request: PlanRequest) -> _Pipeline:
    graph = pipelined_step_of(request)
    (layout, counts), *_ = attempts(request, graph, math.inf, lacks_memory=False)
    return _Pipeline(request, {}, graph, layout, counts[0])


def _least(own: _Pipeline) -> float:
    """What the program of all layers says that the stages take."""
    count, stages = own.microbatches, own.layout.stages
    programs = StagePrograms(own._inside, own.layout, math.inf, Timings())
    pieces = microbatch(own.graph, count, split_inputs(own.request.graph))
    programs.solve(SaveActivations()(pieces.graph), inner_repeats(count, stages), 1e15, math.inf)
    return programs._least


def test_few_layers_say_what_all_take() -> None:
    own = _pipeline(_request())
    found = own.too_slow(Timings(), 1e-9)
    assert found is not None
    assert found.error.seconds == pytest.approx(_least(own), rel=1e-2)  # type: ignore[attr-defined]
    assert "about" in str(found.error), "solvers' gaps and sums of layers are no proof"


def test_few_layers_hide_what_all_hide() -> None:
    """Messages overlap computation as in the step of all layers, of whose gradients the last bucket is a small part."""

    def wide() -> Case:
        config = GPT2Config(n_layer=LAYERS, n_embd=768, n_head=8, vocab_size=1000, n_positions=64)
        ids = torch.zeros(64, 64, dtype=torch.long)
        with torch.device("meta"):
            return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}

    own = _pipeline(requested(wide, (8,), mesh_search=True, stages=None, microbatches=None))
    found = own.too_slow(Timings(), 1e-9)
    assert found is not None
    assert found.error.seconds == pytest.approx(_least(own), rel=2e-3)  # type: ignore[attr-defined]


def test_pipelines_that_may_be_quicker_are_searched_for() -> None:
    own = _pipeline(_request())
    seconds = own.too_slow(Timings(), 1e-9).error.seconds  # type: ignore[union-attr]
    assert own.too_slow(Timings(), 1.01 * seconds / SAFETY_FACTOR) is None
    assert own.too_slow(Timings(), 0.99 * seconds / SAFETY_FACTOR) is not None


def test_they_are_listed_as_excluded_and_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "search", lambda *_: pytest.fail("a pipeline is searched for"))
    monkeypatch.setattr(pipelines, "attempts", lambda *_: attempts(*_[:2], math.inf, False))
    tried = with_stages(_request(), {}, Timings(), 1e-9).tried
    assert not tried.candidates and tried.excluded
    assert all("stages x (" in excluded.name and "microbatch" in excluded.name for excluded in tried.excluded)


@pytest.mark.parametrize("options", [{"stages": 2}, {"schedule": "1f1b"}, {"microbatches": 2}])
def test_pipelines_that_are_asked_for_are_priced(options: dict[str, Any]) -> None:
    assert _pipeline(_request(**options)).too_slow(Timings(), 1e-9) is None


def test_small_models_are_priced_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _pipeline(_request())
    monkeypatch.setattr(pipelines, "MANY_OPERATIONS", len(own.graph) + 1)
    assert own.too_slow(Timings(), 1e-9) is None
