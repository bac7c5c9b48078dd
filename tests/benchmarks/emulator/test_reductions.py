"""Reductions of gradients in pipelines: what hides them, and which a rank waits for."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost.overlap import TAKEN
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import Priced
from benchmarks.emulator.step.section_seconds import SectionTimes
from benchmarks.published_models import build
from benchmarks.published_shape import Shape
from tests.helpers.recipes import layout_of

SHAPE = Shape(6, 256, 8, 8, 32, 1024, gated=False, vocab=1024, seq=128, flash=False)


@cache
def model() -> LayoutModel:
    ids = torch.empty(64, SHAPE.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(SHAPE), (ids, ids))


def price(**named: object) -> Priced:
    return model().price(layout_of(**named), Cluster.get("dgx-a100-80gb"))


def may_be_in_flight(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The buckets that fill first take so long; more are sent of each chunk. What was priced otherwise is forgotten."""
    model.cache_clear()
    monkeypatch.setattr("autopar.placement.overlap_windows.BUCKET_BYTES", 1 << 10)
    monkeypatch.setattr(SectionTimes, "first_buckets", lambda _times, _chunk: seconds)


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_with_more_to_do_wait_for_reductions_but_for_those_in_flight(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """After backward of one chunk of a rank there is that of another one; after that of the first nothing."""
    named = {"pipeline": stages, "interleave": 3 if stages > 1 else 1, "data": 8, "overlap": ("gradient", "message")}
    found = []
    for seconds in (0.0, 1e-5, 1.0):
        may_be_in_flight(monkeypatch, seconds)
        found.append(price(**named))
    none, some, every = (one.parts["reduce"] for one in found)
    assert none > some > every if stages > 1 else none == some == every
    steps = [one.predicted.step_seconds for one in found]
    assert steps == sorted(steps, reverse=True)


def test_reductions_that_nothing_hides_are_not_hidden_by_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a rank end at different times: what is reduced of one travels beside the next only if it may, and then
    takes of the processors. A matrix of each chunk has nothing beside it."""
    may_be_in_flight(monkeypatch, 1.0)
    found, hidden = (
        price(pipeline=2, interleave=3, data=8, overlap=overlap) for overlap in (("message",), ("gradient", "message"))
    )
    assert TAKEN * found.parts["reduce"] < hidden.parts["reduce"] < 0.6 * found.parts["reduce"]
    longer = found.predicted.step_seconds - hidden.predicted.step_seconds
    assert longer > 0.9 * (found.parts["reduce"] - hidden.parts["reduce"])
