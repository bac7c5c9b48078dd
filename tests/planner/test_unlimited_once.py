"""Without a limit of memory, programs that differ in bytes alone have one solution, which is found once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.ir.microbatching import Repeats
from autopar.options import Options
from autopar.planner import mesh_solution
from autopar.planner import solve_mesh as planner
from autopar.planner.memory_limit import ShortOfMemoryError, TooSlowError
from autopar.planner.mesh_solution import peak_bytes
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings, solve_in_time
from autopar.solver.cost_digest import cost_digest
from autopar.solver.problem import Problem, Solution, memory_of
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import requested
from tests.solver.test_solve import layered


def small() -> Case:
    return Stack(layers=1, width=16, hidden=32), text(8, 8)


def test_stages_that_hold_more_microbatches_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    request, counting = requested(small, (2,)), Mock(side_effect=planner.solve_in_time)
    graph = step_graph(request.graph, request.loss, request.batch)
    monkeypatch.setattr(planner, "solve_in_time", counting)

    def solved(count: int, in_flight: int, worth: float = float("inf")) -> planner.MeshSolution:
        asked = replace(request, repeats=Repeats(count, in_flight, accumulates=True, stages=4), worth=worth)
        return planner.solve_only(asked, graph, Timings())

    few, many = solved(4, 2), solved(4, 4)
    assert counting.call_count == 1
    assert few.solution.objective == many.solution.objective == pytest.approx(many.breakdown.seconds)
    assert memory_of(few.instance.problem, few.solution.choices) < memory_of(
        many.instance.problem, many.solution.choices
    )
    with pytest.raises(TooSlowError, match="take at least"):  # What is known already says so.
        solved(4, 4, worth=0.5 * few.solution.bound)
    assert counting.call_count == 1
    assert solved(8, 4).solution.objective > many.solution.objective and counting.call_count == 2


def test_a_program_with_all_recomputed_is_solved_once_for_two_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """That for what does not fit asks for the quickest alone, before the search for what does."""
    request, counting = requested(small, (2,), recompute="full"), Mock(side_effect=planner.solve_in_time)
    graph, least = step_graph(request.graph, request.loss, request.batch), replace(request, memory_limit=1000)
    monkeypatch.setattr(planner, "solve_in_time", counting)
    with pytest.raises(ShortOfMemoryError):
        planner.solve_mesh(replace(least, only_quickest=True), graph, Timings())
    with pytest.raises(InfeasibleError):
        planner.solve_mesh(least, graph, Timings())
    unlimited = [problem for (problem, *_), _ in counting.call_args_list if np.isinf(problem.memory_limit)]
    assert len(unlimited) == 1


def test_the_digest_is_of_seconds_and_of_a_host_that_binds() -> None:
    problem = layered(6, 3)
    first = problem.groups[0]
    more = replace(problem, groups=(replace(first, memory=first.memory + 1.0), *problem.groups[1:]))
    assert cost_digest(more) == cost_digest(problem)
    dearer = replace(problem, groups=(replace(first, cost=first.cost + 1.0), *problem.groups[1:]))
    moved = problem.transfers[0]
    dearer_move = replace(problem, transfers=(replace(moved, cost=moved.cost + 1.0), *problem.transfers[1:]))
    held = replace(problem, groups=tuple(replace(g, host=np.ones_like(g.cost)) for g in problem.groups))
    binding = [replace(held, host_limit=limit) for limit in (1.0, 2.0)]
    assert len({cost_digest(each) for each in (problem, dearer, dearer_move, *binding)}) == 5
    assert cost_digest(replace(held, host_limit=100.0)) == cost_digest(problem)


def test_the_step_of_a_solution_is_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for stages asks what the quickest step holds before plans without stages are searched for."""
    request, rehearsing = requested(small, (2,)), Mock(side_effect=mesh_solution.exact_memory)
    monkeypatch.setattr(mesh_solution, "exact_memory", rehearsing)
    graph = step_graph(request.graph, request.loss, request.batch)
    held = planner.solve_mesh(request, graph, Timings())[0].step.memory
    assert held.memory is not None and rehearsing.call_count == 1
    assert planner.solve_mesh(request, graph, Timings())[0].step.memory == held
    assert rehearsing.call_count == 1
    for part in (2, 3):  # Under such limits, what baselines hold is in doubt.
        limited = replace(request, options=replace(request.options, memory_limit=part * held.memory.peak))
        assert planner.solve_mesh(limited, graph, Timings())[0].step.memory == held
    assert rehearsing.call_count <= 4


@pytest.mark.parametrize("limited", [True, False])
def test_what_a_search_did_not_finish_is_unfinished_for_plans_that_share_it(
    limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such plans are not cached: the next search may do better."""
    settings: dict[str, Any] = {"recompute": "none", "offload": False}
    request = requested(small, (2,), **settings)
    graph = step_graph(request.graph, request.loss, request.batch)
    peak = peak_bytes(planner.solve_mesh(request, graph, Timings())[0])

    def cut_off(problem: Problem, options: Options, timings: Timings, *args: Any, **given: Any) -> Solution:
        solution = solve_in_time(problem, options, timings, *args, **given)
        if np.isfinite(problem.memory_limit) != limited:
            return solution
        timings.cut_off = True
        return replace(solution, status="feasible")

    calls = Mock(side_effect=cut_off)
    monkeypatch.setattr(planner, "solve_in_time", calls)
    request, parts = requested(small, (2,), **settings), (0.9, 0.899) if limited else (2.0, 1.9)
    for part in parts:
        counted, timings = calls.call_count, Timings()
        short = replace(request, options=replace(request.options, memory_limit=int(part * peak)))
        planner.solve_mesh(short, graph, timings)
        assert (calls.call_count > counted) == (part == parts[0])
        assert timings.cut_off or timings.reuses
