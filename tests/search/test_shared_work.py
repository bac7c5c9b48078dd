"""What candidates share is what each of them would compute by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from autopar.planner.shared_work import KEPT, KEPT_NODES, SharedWork
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from tests.helpers.marks import slow_but
from tests.helpers.planning import requested

ASKED: dict[str, dict[str, Any]] = {
    "searched": {"mesh_search": True, "stages": None, "microbatches": None},
    "staged": {"mesh_search": True, "stages": 2, "microbatches": None},
}


def _found(name: str, once: Callable[..., Any]) -> tuple[Plan, Counter[str]]:
    """The plan, and how often each kind of work was asked for."""
    request, asked = requested("stack", (2, 2), **ASKED[name]), Counter[str]()

    def counted(self: SharedWork, kind: str, *rest: Any, **settings: Any) -> Any:
        asked[kind] += 1
        return once(self, kind, *rest, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedWork, "once", counted)
        found = best_plan(replace(request, shared=SharedWork()), Timings())
    return replace(found, solve_seconds=0.0, timings={}), asked


@pytest.mark.parametrize("name", slow_but(["staged"], ASKED))
def test_a_plan_does_not_depend_on_what_is_shared(name: str) -> None:
    shared, asked = _found(name, SharedWork.once)
    alone, _ = _found(name, lambda self, kind, of, *settings, make, kept=0: make())
    assert shared == alone and shared.to_text() == alone.to_text()
    assert asked["annotated graph"] > 1


def test_only_the_latest_results_are_kept() -> None:
    work, made = SharedWork(), list[int]()

    def make(number: int) -> Callable[[], int]:
        return lambda: made.append(number) or number

    graphs = [torch.empty(0) for _ in range(3)]
    for turn in (0, 1, 0, 2, 0, 1):
        assert work.once("kind", (graphs[turn],), make=make(turn), kept=2) == turn
    assert made == [0, 1, 2, 1]


def test_of_small_graphs_more_are_kept() -> None:
    request, work, made = requested("stack", (2, 2)), SharedWork(), list[int]()
    settings = range(KEPT_NODES // len(request.graph))
    assert len(settings) > KEPT
    for _ in range(2):
        for each in settings:
            work.once("kind", (request.graph,), each, make=partial(made.append, each))
    assert made == list(settings)
