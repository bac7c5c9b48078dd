"""What several limits of memory have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.errors import OptionsError
from autopar.ir.placements import Strategy, parse_placements
from autopar.ir.planned_pipeline import PlannedPipeline
from autopar.planner import solve_mesh
from autopar.plans.plan import Plan
from autopar.plans.question import Question, question_of
from autopar.plans.views.what_if import Answer
from autopar.plans.within_limits import quickest_within
from autopar.schedule.schedule import Schedule
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


Cell = tuple[int, float, float]


@cache
def _planned() -> Plan:
    return questions.ask()


def _asked(seconds: float = 9.0, **changed: Any) -> Plan:
    """A plan of so many ``seconds`` that holds more than any limit."""
    plan = _planned()
    predicted = replace(plan.predicted, step_seconds=seconds, peak_bytes=1000)
    return replace(plan, **{"objective": seconds, "predicted": predicted, "memory_limit": 1000} | changed)


def _answers(*cells: Cell, **changed: Any) -> list[Answer[Plan]]:
    """Answers of so many (limit, seconds, bound), whose plans hold all that they may."""
    found = []
    for limit, seconds, bound in cells:
        own = _asked(seconds, memory_limit=limit, bound=bound, gap=1.0 - bound / seconds, status="feasible", **changed)
        own = replace(own, predicted=replace(own.predicted, peak_bytes=limit))
        found.append(Answer[Plan]("memory_limit", limit, limit, own))
    return found


def _seen(found: Sequence[Answer[Plan]]) -> list[tuple[int, float, float, float, str]]:
    """Of each its limit, seconds, bound, gap and status."""
    plans = [answer.plan for answer in found if answer.plan is not None]
    return [(own.memory_limit, own.predicted.step_seconds, own.bound, own.gap, own.status) for own in plans]


def test_a_larger_limit_has_the_quicker_plan_of_a_smaller_one() -> None:
    """With the bound of the larger: that of the smaller limit does not hold there."""
    cells = _answers((10, 8.0, 7.0), (20, 5.0, 4.9), (30, 6.0, 3.0), (40, 5.0, 2.5))
    found = quickest_within(cells, _asked(), 0.01, alone_first=False)
    assert _seen(found) == [
        (10, 8.0, 7.0, 1.0 - 7.0 / 8.0, "feasible"),
        (20, 5.0, 4.9, 1.0 - 4.9 / 5.0, "feasible"),
        (30, 5.0, 3.0, 1.0 - 3.0 / 5.0, "feasible"),
        (40, 5.0, 2.5, 1.0 - 2.5 / 5.0, "feasible"),
    ]
    assert found[0] is cells[0] and found[1] is cells[1] and found[3] is cells[3]


def test_a_bound_of_a_still_larger_limit_holds_and_that_of_another_program_does_not() -> None:
    quick, slow, largest = _answers((10, 5.0, 4.9), (20, 6.0, 5.99), (40, 4.99, 4.98))
    other = replace(slow.plan, microbatches=2)
    found = quickest_within([quick, replace(slow, plan=other), largest], _asked(bound=4.0), 0.01, alone_first=False)
    assert _seen(found)[1] == (20, 5.0, 4.98, 1.0 - 4.98 / 5.0, "optimal")
    found = quickest_within([quick, replace(slow, plan=other)], _asked(microbatches=2), 0.01, alone_first=False)
    assert _seen(found)[1] == (20, 5.0, 0.0, 1.0, "feasible"), "nothing is proven"


def test_a_bound_of_other_shares_of_the_rows_does_not_hold() -> None:
    """The program of one division of the rows says nothing of another's, though the mesh is the same."""
    quick, slow = _answers((10, 5.0, 4.9), (20, 6.0, 5.99))
    uneven = Strategy((), (parse_placements("S(0:3+1), R"),))
    other = replace(slow.plan, strategies={**slow.plan.strategies, "more": uneven})
    found = quickest_within([quick, replace(slow, plan=other)], _asked(microbatches=2), 0.01, alone_first=False)
    assert _seen(found)[1] == (20, 5.0, 0.0, 1.0, "feasible"), "nothing is proven"


def test_a_bound_of_one_stage_is_none_of_stages_with_meshes_of_their_own() -> None:
    """Such a plan names the bound of the program on one of the meshes; its gap is the largest of any."""
    staged = PlannedPipeline((), Schedule("1f1b", 1, (0, 1), (), ((), ()), (1, 1)), meshes=((2, 2), (1, 1)))
    quick, slow = _answers((10, 5.0, 4.99), (20, 6.0, 4.99), pipeline=staged, stages=2)
    assert quick.plan is not None
    quick = replace(quick, plan=replace(quick.plan, gap=0.3))
    found = quickest_within([quick, slow], _asked(), 0.01, alone_first=False)
    assert _seen(found)[1] == (20, 5.0, 0.0, 1.0, "feasible"), "nothing is proven"


def test_a_limit_without_a_plan_has_that_of_a_smaller_one() -> None:
    (small,) = _answers((10, 5.0, 4.0))
    nothing = Answer[Plan]("memory_limit", 20, 20, None, "nothing fits")
    found = quickest_within([small, nothing], _asked(bound=3.0), 0.01, alone_first=False)
    assert _seen(found)[1] == (20, 5.0, 3.0, 1.0 - 3.0 / 5.0, "feasible") and found[1].error == ""
    before = Answer[Plan]("memory_limit", 5, 5, None, "nothing fits")
    assert quickest_within([before, small], _asked(), 0.01, alone_first=False)[0] is before


def test_the_plan_that_was_asked_is_the_answer_where_it_fits_and_is_quickest() -> None:
    asked = _asked(4.0, bound=3.5)
    asked = replace(asked, predicted=replace(asked.predicted, peak_bytes=25))
    found = quickest_within(_answers((20, 5.0, 4.9), (30, 4.5, 3.9)), asked, 0.01, alone_first=False)
    assert _seen(found)[1] == (30, 4.0, 3.9, 1.0 - 3.9 / 4.0, "feasible")


def test_stages_replace_no_plan_without_them_where_search_would_not_either() -> None:
    quick, slow = _answers((10, 5.0, 4.9), (20, 6.0, 5.9))
    assert quick.plan is not None
    staged = replace(quick, plan=replace(quick.plan, stages=2, mesh=(2,)))
    assert quickest_within([staged, slow], _asked(), 0.01, alone_first=True)[1] is slow
    assert quickest_within([staged, slow], _asked(), 0.01, alone_first=False)[1].seconds == 5.0


@pytest.mark.usefixtures("own_plans")
def test_a_table_has_no_slower_plan_for_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here what is found for the larger limit is another plan, which takes ten times as long. What is taken instead can
    be asked as any other."""
    plan = questions.ask(stages=1, microbatches=1)
    peak = plan.predicted.peak_bytes
    solve = Question.again

    def slow(question: Question, **changed: Any) -> Plan:
        found: Plan = solve(question, **changed)
        if changed["options"].memory_limit < peak:
            return found
        seconds = 10.0 * found.predicted.step_seconds
        return replace(found, predicted=replace(found.predicted, step_seconds=seconds), objective=seconds)

    monkeypatch.setattr(Question, "again", slow)
    less, more = plan.whatif(memory_limit=[int(0.9 * peak), peak]).answers
    assert less.plan is not None and more.plan is not None
    assert more.plan.predicted.step_seconds == plan.predicted.step_seconds <= less.plan.predicted.step_seconds
    assert question_of(more.plan).options.memory_limit == peak


def test_what_the_smallest_device_cannot_hold_replaces_no_plan_of_devices_that_differ() -> None:
    """Stages on devices of 20 and 40 bytes: what holds 30 on any of them does not fit, and what holds 10 does."""
    staged = PlannedPipeline((), Schedule("1f1b", 1, (0, 1), (), ((), ()), (1, 1)), limits=(20, 40))
    (slow,) = _answers((40, 6.0, 5.0), pipeline=staged, stages=2)
    much, little = (replace(_asked(4.0), predicted=replace(_asked(4.0).predicted, peak_bytes=n)) for n in (30, 10))
    assert quickest_within([slow], much, 0.01, alone_first=False) == [slow]
    (taken,) = quickest_within([slow], little, 0.01, alone_first=False)
    assert taken.plan is not None and (taken.plan.memory_limit, taken.plan.predicted.peak_bytes) == (20, 10)


def test_what_is_said_to_be_enough_is_no_more_than_a_plan_of_the_table_holds() -> None:
    (small,) = _answers((10, 5.0, 4.0))
    nothing = Answer[Plan]("memory_limit", 5, 5, None, "nothing fits; 12 bytes would be enough", needed_bytes=12)
    found = quickest_within([nothing, small], _asked(), 0.01, alone_first=False)
    assert found[0].needed_bytes == 10 and found[0].error.endswith("holds less: 10 bytes (10 B)")
    nothing = replace(nothing, needed_bytes=9)
    assert quickest_within([nothing, small], _asked(), 0.01, alone_first=False)[0] is nothing


def test_a_limit_may_be_a_float_as_in_options(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = questions.ask()
    monkeypatch.setattr("autopar.plans.question.Question.again", lambda question, **changed: plan)
    assert [answer.value for answer in plan.whatif(memory_limit=[1.5e9, 2e9 + 0.5]).answers] == [1500000000, 2000000000]
    assert autopar.Options(memory_limit=1.5e9).memory_bytes == 1500000000
    with pytest.raises(OptionsError, match="memory_limit=inf is not a positive number of bytes per device"):
        plan.whatif(memory_limit=[1e9, float("inf")])
