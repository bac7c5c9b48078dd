"""What searches may spend: seconds of computing, or counted work that no clock changes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ortools.math_opt import result_pb2

from autopar.options import Options
from autopar.planner.timings import Timings, solve_in_time
from autopar.solver import budget as solve_budget
from autopar.solver import highs as solve_run
from autopar.solver.budget import Budget
from autopar.solver.highs import run
from autopar.solver.milp import build
from autopar.solver.outcome import Effort
from autopar.solver.problem import Problem, memory_of
from autopar.solver.solve import _solve_plain, solve
from tests.solver.test_solve import layered


def hurry(monkeypatch: pytest.MonkeyPatch, times: float = 1000.0) -> None:
    """Clocks as on a machine so many times slower, or busier."""
    for name in ("process_time", "monotonic", "perf_counter"):
        clock = getattr(time, name)
        monkeypatch.setattr(time, name, lambda clock=clock: times * clock())


def hard() -> Problem:
    problem: Problem = layered(40, 8, share=0.1)
    return problem


def test_counted_work_ends_at_the_same_answer_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    first = solve(hard(), time_limit=0.6, gap=0.0, counted=True)
    hurry(monkeypatch)
    second = solve(hard(), time_limit=0.6, gap=0.0, counted=True)
    assert (first.choices == second.choices).all() and first.bound == second.bound
    timed = solve(hard(), time_limit=0.6, gap=0.0)
    assert timed.bound < second.bound


def test_counted_work_is_about_seconds() -> None:
    """What is begun is sure to end in what is left, or nearly: programs are charged by what they took."""
    budget = Budget(1.0, counted=True)
    assert budget.left == 1.0
    _solve_plain(hard(), budget, 0.0, 0, ())
    assert 0.1 < budget.spent < 2.0


def test_a_part_is_spent_of_the_whole() -> None:
    whole = Budget(10.0, counted=True)
    part = whole.part(0.5).part(most=2.0)
    part.spend(1.5)
    assert part.left == pytest.approx(0.5) and whole.left == pytest.approx(8.5)


@pytest.mark.parametrize("counted", [True, False])
def test_a_program_is_not_begun_where_what_is_left_cannot_be_enough(
    counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = build(hard())
    monkeypatch.setattr(solve_budget, "run", lambda *_: pytest.fail("begun"))
    outcome = Budget(1e-3, counted).branch(program, gap=0.0)
    assert outcome.status == "unknown" and len(outcome.values) == 0 and outcome.bound == -np.inf
    assert Budget(1e-3, counted).relax(program, seed=0).status == "unknown"


def test_a_program_is_begun_where_its_root_usually_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the hardest would not. The clock may then go on for as long as that one takes."""
    program, efforts = build(hard()), list[Effort]()
    root = solve_budget.ROOT_SECONDS * len(program.value)

    def recorded(program: Any, relaxed: bool, effort: Effort) -> Any:
        efforts.append(effort)
        return solve_budget.UNKNOWN

    monkeypatch.setattr(solve_budget, "run", recorded)
    Budget(0.4 * root, counted=True).branch(program, gap=0.0)
    assert not efforts
    Budget(0.6 * root, counted=True).branch(program, gap=0.0)
    (begun,) = efforts
    assert begun.nodes == 1 and begun.time_limit == pytest.approx(solve_budget.GUARD * root, rel=1e-3)


def test_a_search_ends_once_it_has_enough() -> None:
    """With what it has proven until then, and without a relaxation or branches."""
    problem = hard()
    known = solve(problem, time_limit=0.6, gap=0.0, counted=True)
    budget = Budget(5.0, counted=True)
    found = _solve_plain(problem, budget, 0.0, 0, (), 1.1 * known.objective)
    assert found.status == "feasible" and found.objective <= 1.1 * known.objective
    assert found.bound <= known.objective and budget.spent < 1.0


def test_problems_whose_work_is_counted_are_solved_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is what they took of the time limit."""
    options = Options(time_limit=1.2, gap=0.0)
    first, second = Timings(counted=True), Timings(counted=True)
    one = solve_in_time(hard(), options, first)
    hurry(monkeypatch)
    other = solve_in_time(hard(), options, second)
    assert (one.choices == other.choices).all() and one.bound == other.bound
    assert first.solving == second.solving > 0.3


def test_a_hard_program_is_begun_where_there_is_time() -> None:
    program = build(hard())
    assert Budget(60.0, counted=True).branch(program, gap=0.5).status == "optimal"


def test_a_solver_kept_from_the_processor_is_given_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own clock is that of the wall."""
    given, problem = list[float](), layered(6, 3)
    least = replace(problem, memory_limit=memory_of(problem, solve(problem).choices))
    solver = solve_run._run

    def kept_waiting(*asked: Any) -> result_pb2.SolveResultProto:
        given.append(asked[-1].time_limit)
        if len(given) > 1:
            return solver(*asked)
        time.sleep(0.2)
        stopped = result_pb2.SolveResultProto()
        stopped.termination.reason = result_pb2.TERMINATION_REASON_NO_SOLUTION_FOUND
        stopped.termination.limit = result_pb2.LIMIT_TIME
        return stopped

    monkeypatch.setattr(solve_run, "_run", kept_waiting)
    assert run(build(least), False, Effort(0.5)).status == "optimal"
    assert given[0] == 0.5 and 2 * given[0] < given[1] <= 3 * given[0]


def test_a_solver_that_is_cut_off_twice_computes_a_few_times_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept from the processor for its first half, and the machine idle from then on."""
    given = list[float]()

    def half_waiting(*asked: Any) -> result_pb2.SolveResultProto:
        given.append(asked[-1].time_limit)
        end, wall = time.process_time() + (0.2 if len(given) == 1 else 0.0), 0.2
        while time.process_time() < end:
            pass
        time.sleep(wall if len(given) == 1 else 0.0)
        result = result_pb2.SolveResultProto()
        result.termination.reason = result_pb2.TERMINATION_REASON_FEASIBLE
        result.termination.limit = result_pb2.LIMIT_TIME
        result.termination.objective_bounds.dual_bound = 2.0 / len(given)
        return result

    monkeypatch.setattr(solve_run, "_run", half_waiting)
    program = build(layered(6, 3))
    outcome = run(program, False, Effort(0.4))
    assert len(given) == 2 and given[1] <= 3 * (0.4 - 0.2) * 1.01
    assert outcome.bound == 2.0 * program.unit
