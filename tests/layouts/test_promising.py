"""Placement programs that are not solved: their bounds hold, and the answer is that of the whole search."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.layout import Layout
from autopar.layouts.model import LayoutModel
from autopar.layouts.promising import SPARE, PromisingLayouts
from autopar.layouts.search import best_layout
from autopar.layouts.space import PLANNED, Space
from autopar.layouts.trials import LayoutSearch
from benchmarks.published_models import build
from benchmarks.published_shape import Experts, Shape

A100 = Cluster.get("dgx-a100-80gb")
SHAPE = Shape(8, 512, 8, 8, 64, 2048, gated=False, vocab=2048, seq=256, flash=True)
# Of experts, bounds know nothing.
EXPERTS = replace(SHAPE, layers=3, gated=True, experts=Experts(16, 2, 512))
NEAR = 1.05


@cache
def model(batch: int, shape: Shape = SHAPE) -> LayoutModel:
    ids = torch.empty(batch, shape.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(shape), (ids, ids))


def search(batch: int, shape: Shape = SHAPE) -> LayoutSearch:
    return LayoutSearch(model(batch, shape), A100, batch, None, Layout(precision="bf16"), PLANNED)


@pytest.mark.parametrize("batch", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_no_layout_takes_less_than_its_bound(batch: int) -> None:
    promising = PromisingLayouts(search(batch), 16)
    for program, bounds in promising.bounds.items():
        promising.solve(program)
        least = {quick.layout: quick for quick in bounds}
        assert promising.solved[program], program
        for quick in promising.solved[program]:
            bound = least[quick.layout]
            assert bound.seconds <= quick.seconds * (1 + 1e-9), quick.layout
            assert bound.peak <= SPARE * quick.peak, quick.layout
            assert promising.may_fit(bound) or not promising.search.fits(quick), quick.layout
        if program[0] == 1:
            assert all(least[quick.layout].seconds == quick.seconds for quick in promising.solved[program])
        fitting = [quick.seconds for quick in promising.solved[program] if promising.search.fits(quick)]
        assert promising.least(program) <= min(fitting) * (1 + 1e-9)


@pytest.mark.parametrize(("batch", "limit"), [(32, None), pytest.param(64, 300_000_000, marks=pytest.mark.slow)])
def test_what_is_not_solved_is_not_among_the_quickest(batch: int, limit: int | None) -> None:
    whole = best_layout(model(batch), A100, 16, batch=batch, limit=limit)
    found = best_layout(model(batch), A100, 16, batch=batch, limit=limit, near=NEAR)
    assert [one.layout for one in found.ranked] == [one.layout for one in whole.ranked]
    assert found.ranked == whole.ranked and found.rule == whole.rule


def test_programs_that_cannot_have_the_quickest_are_not_solved() -> None:
    promising = PromisingLayouts(search(32), 16)
    tried, priced = promising.quickest(NEAR)
    left = promising.layouts.keys() - promising.solved.keys()
    assert left and {quick.layout for quick in tried} >= {quick.layout for p in left for quick in promising.bounds[p]}
    worst = max(one.predicted.step_seconds for one in priced)
    assert all(promising.least(program) > worst for program in left)


def test_programs_of_experts_are_all_solved() -> None:
    of_experts = replace(search(8, EXPERTS), space=Space(tensor=(2,), expert=(4,), microbatch=(1, 2)))
    promising = PromisingLayouts(of_experts, 8)
    promising.quickest(NEAR)
    assert promising.solved.keys() == promising.layouts.keys() == {(2, 1), (2, 2)}
