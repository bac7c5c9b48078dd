"""What several limits of memory have in common."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.planner import solve_mesh
from tests.plans import test_what_if as questions
from tests.plans.test_what_if import own_plans

__all__ = ["own_plans"]


@pytest.mark.usefixtures("own_plans")
def test_what_fits_into_less_memory_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, solve = list[object](), solve_mesh._solve_limited

    def counted(*args: Any) -> Any:
        solved.append(args)
        return solve(*args)

    plan = questions.ask(stages=1, microbatches=1)
    monkeypatch.setattr(solve_mesh, "_solve_limited", counted)
    limit = int(0.9 * plan.predicted.peak_bytes)
    (alone,) = plan.whatif(memory_limit=limit).answers
    once, less = len(solved), alone.plan.predicted.peak_bytes
    assert once and less < limit
    first, second = plan.whatif(memory_limit=[less, limit]).answers
    assert len(solved) == 2 * once
    assert first.plan.predicted == second.plan.predicted == alone.plan.predicted
    assert [each.value for each in (first, second)] == [less, limit]
