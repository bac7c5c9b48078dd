"""Steps that are alike, chunks of a pipeline: what is priced once for all of them is what each has by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Plan
from autopar.placement.alike_steps import forms_of
from autopar.placement.placed_step import PlacedStep
from autopar.search import fitting_schedules
from autopar.search.schedules.chunks import Chunk
from autopar.search.stage_prices import pipeline_breakdown
from autopar.search.stage_prices.pipeline_breakdown import PipelineBreakdown, price_stages
from tests.helpers.marks import slow_but
from tests.helpers.models import Case
from tests.helpers.planning import planned


class Block(nn.Module):
    def __init__(self, width: int, drops: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.drop = nn.Dropout(drops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Twelve equal blocks, of which the fifth may drop more than the others; the head is the embedding's weight."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Block(16, 0.5 if odd and i == 4 else 0.1) for i in range(12))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def _each_alone(steps: Sequence[PlacedStep]) -> tuple[int, ...]:
    return tuple(range(len(steps)))


@cache
def _case_of(odd: bool) -> Callable[[], Case]:
    ids = torch.zeros(16, 8, dtype=torch.int64)
    return lambda: (Model(odd), {"ids": ids, "labels": ids})


def _plan(odd: bool = False, **options: Any) -> Plan:
    return planned(_case_of(odd), (8,), **options)


FIELDS: list[dict[str, Any]] = [
    {"stages": 4, "schedule": "1f1b"},
    {"stages": 4, "schedule": "interleaved", "recompute": "full"},
    {"stages": 2, "schedule": "zb-v", "compile": True},
]


@pytest.mark.parametrize("fields", slow_but(FIELDS[:1], FIELDS))
def test_what_is_priced_once_is_what_each_chunk_has(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    spared: list[int] = []

    def both(chunks: tuple[Chunk, ...], *rest: Any) -> PipelineBreakdown:
        together = price_stages(chunks, *rest)
        with monkeypatch.context() as patch:
            patch.setattr(pipeline_breakdown, "forms_of", _each_alone)
            alone = price_stages(chunks, *rest)
        assert together.breakdowns == alone.breakdowns
        assert together.prices == alone.prices
        spared.append(len(chunks) - len({id(price) for price in together.prices.chunks}))
        return together

    monkeypatch.setattr(fitting_schedules, "price_stages", both)
    assert _plan(microbatches=4, **fields).stages == fields["stages"]
    assert max(spared) > 0


def test_an_odd_layer_sets_its_chunk_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []

    def recorded(steps: Sequence[PlacedStep]) -> tuple[int, ...]:
        found.append(forms_of(steps))
        return found[-1]

    monkeypatch.setattr(pipeline_breakdown, "forms_of", recorded)
    for odd in (False, True):
        _plan(odd, stages=4, microbatches=4, schedule="1f1b")
    alike, apart = found[0], found[-1]
    assert len(set(apart)) > len(set(alike))
