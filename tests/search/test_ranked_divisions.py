"""Divisions of many devices, ranked by estimates from placement programs of few layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers as hf
from torch import nn

from autopar.layout import Layout
from autopar.options import Options
from autopar.planner.request import NEAR, PlanRequest, Proposals, memory_limit_of
from autopar.planner.roles.expert_blocks import expert_blocks
from autopar.search.proposals import proposals
from autopar.search.proposals.few_layer_step import FewLayerStep
from autopar.search.proposals.mixtures import MixtureRanking
from autopar.search.proposals.proposals import proposed_layouts
from autopar.search.proposals.ranking import Ranking
from autopar.search.proposals.stage_programs import StagePrograms, division
from tests.helpers.models import Case, llama, text
from tests.helpers.planning import requested


def _mixture() -> Case:
    config = hf.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=16, vocab_size=64, bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config), text()


def _few_products() -> Case:
    return _Products(), {"x": torch.zeros(8, 8)}


class _Products(nn.Module):
    """A model without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(self.first(x)).square().mean()
        return loss


def _on_many(source: object, **options: object) -> PlanRequest:
    """The request to plan a model on 128 devices, with a batch of 256."""
    asked = requested(source, (16, 8), "dgx-a100-80gb", mesh_search=True, stages=None, microbatches=None, **options)  # type: ignore[arg-type]
    return replace(asked, batch=256)


def _llama() -> Case:
    return llama(8)


@cache
def _proposed() -> Proposals:
    return proposed_layouts(_on_many(_llama))


def _check(found: Proposals) -> None:
    assert found.layouts
    assert min(found.quick[layout] for layout in found.layouts) == found.quick[found.layouts[0]]
    assert all(map(found.is_near, found.layouts)) and set(found.layouts) < set(found.quick)
    for layout in found.layouts:
        assert layout.pipeline > 1
        assert layout.tensor * layout.pipeline * layout.data * layout.context == 128
        Options(layout=layout)


def test_proposed_layouts_have_stages_and_use_all_devices() -> None:
    found = _proposed()
    _check(found)
    degrees = {(layout.tensor, layout.pipeline, layout.data) for layout in found.layouts}
    assert len(degrees) == len(found.layouts)
    # Six heads do not divide among four tensor ranks, nor eight: there is no rule of thumb.
    assert all(layout.tensor <= 2 for layout in found.layouts) and found.rule is None


def test_other_microbatches_of_what_is_proposed_have_prices() -> None:
    found = _proposed()
    for layout in found.layouts:
        for samples in (1, 2, 4, 8):
            if 256 % (layout.data * samples) == 0:
                assert found.quick[division(layout.tensor, layout.pipeline, layout.data, samples)] > 0


@pytest.mark.slow
def test_proposals_are_the_same_on_every_run() -> None:
    assert proposed_layouts(_on_many(_llama)) == _proposed()


def test_a_model_without_layers_has_no_proposals() -> None:
    assert proposed_layouts(_on_many(_few_products)) == Proposals()


@cache
def _ranking() -> Ranking:
    request = _on_many(_llama)
    step = FewLayerStep.of(request)
    assert step is not None
    return Ranking(request, StagePrograms(step))


def test_what_cannot_fit_is_excluded_without_a_program() -> None:
    ranking = _ranking()
    request = replace(ranking.request, options=replace(ranking.request.options, memory_limit=1000))
    assert memory_limit_of(request) == 1000
    programs = StagePrograms(ranking.programs.step)
    scarce = Ranking(request, programs)
    assert list(scarce.best_first()) == []
    assert programs.any_of(2) is None, "only the program of one device is solved"


def test_what_is_not_worth_while_is_left_out_and_named() -> None:
    request, found = _on_many(_llama), _proposed()
    least = found.quick[found.layouts[0]]
    none = proposed_layouts(replace(request, worth=0.5 * least))
    assert none.layouts == () and none.slow is not None
    assert 0.5 * least < none.slow_seconds <= least
    assert proposed_layouts(replace(request, worth=1.2 * least)).layouts == found.layouts


def test_the_rule_of_thumb_keeps_its_estimate_where_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is known to take at least, which says that it is too slow, is less."""
    request, (best,) = _on_many(_llama), _proposed().layouts
    monkeypatch.setattr(proposals, "rule_of_thumb", lambda ranking: best)
    monkeypatch.setattr(Ranking, "best_first", lambda ranking, worth: _at_least(ranking, best, 0.1))
    found = proposed_layouts(replace(request, worth=0.05))
    assert (found.slow, found.slow_seconds) == (best, 0.1)
    assert found.quick[best] == _proposed().quick[best]


def _at_least(ranking: Ranking, layout: Layout, seconds: float) -> Iterator[Layout]:
    ranking.known[layout] = seconds
    yield layout


def test_degrees_that_do_not_divide_the_batch_are_left_out() -> None:
    every = list(_ranking().every())
    assert every and all(256 % (layout.data * layout.microbatch) == 0 for layout in every)
    assert division(1, 2, 64, 8) not in every


def test_far_divisions_are_not_ranked() -> None:
    ranking = _ranking()
    found = [ranking.estimate(layout) for layout in ranking.best_first()]
    assert found == sorted(found) and max(found) <= NEAR * min(found)


@pytest.mark.slow
def test_a_mixture_is_proposed_with_its_data_ranks() -> None:
    request = _on_many(_mixture)
    step = FewLayerStep.of(request)
    assert step is not None and expert_blocks(step.graph)
    ranking = MixtureRanking(request, StagePrograms(step))
    (placed,) = ranking.programs.placed_on(division(2, 2, 32, 1))
    assert placed.solution.prices.mesh == (32, 2) and placed.has_data
    found = proposed_layouts(request)
    _check(found)
    assert math.isfinite(min(found.quick.values()))
