"""What needs the fewest bytes is found once for all limits, and not at all where a program counts too many."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest

from autopar.errors import InfeasibleError
from autopar.ir.microbatching import Repeats
from autopar.planner import fewest_bytes
from autopar.planner import solve_mesh as planner
from autopar.planner.mesh_solution import peak_bytes
from autopar.planner.shared_work import SharedWork
from autopar.planner.solve_mesh import solve_mesh, solve_only
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings, solve_in_time
from autopar.solver.solve import solve
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import requested


def small() -> Case:
    return Stack(layers=1, width=16, hidden=32), text(8, 8)


def test_limits_have_the_least_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    request, counting = replace(requested(small, (2,)), shared=SharedWork()), Mock(side_effect=solve)
    graph = step_graph(request.graph, request.loss, request.batch)
    monkeypatch.setattr(fewest_bytes, "solve", counting)
    needed = set[int | None]()
    for limit in (1000, 2000):
        with pytest.raises(InfeasibleError) as caught:
            solve_mesh(replace(request, memory_limit=limit), graph, Timings())
        needed.add(caught.value.needed_bytes)
    assert counting.call_count == 2 + len(fewest_bytes.MORE_MEMORY)  # What waits in buckets is counted, or not.
    assert len(needed) == 1 and None not in needed


@pytest.mark.parametrize("part", [0.9, 0.8])
def test_less_than_the_least_is_not_approached_at_all(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program with a limit is solved to see that a small step does not fit."""
    request = replace(requested(small, (2,)), shared=SharedWork())
    graph = step_graph(request.graph, request.loss, request.batch)
    with pytest.raises(InfeasibleError) as caught:
        solve_only(replace(request, memory_limit=1000), graph, Timings())
    assert caught.value.needed_bytes is not None
    limit, counting = part * caught.value.needed_bytes, Mock(side_effect=solve_in_time)
    monkeypatch.setattr(planner, "solve_in_time", counting)
    with pytest.raises(InfeasibleError) as caught:
        solve_only(replace(request, memory_limit=limit), graph, Timings())
    limited = [problem for (problem, *_), _ in counting.call_args_list if math.isfinite(problem.memory_limit)]
    assert not limited
    assert caught.value.needed_bytes == round(limit / part)


def test_gradients_that_wait_hide_nothing_that_fits() -> None:
    """The quickest step of 161,288 bytes counts more than the fewest, gradients that wait included."""
    request = replace(requested(small, (2,), offload=False), memory_limit=161288)
    graph = step_graph(request.graph, request.loss, request.batch)
    assert peak_bytes(solve_only(request, graph, Timings())) <= 161288


def test_programs_with_a_limit_prove_nothing_of_steps_that_are_rehearsed() -> None:
    request = requested(small, (2,), offload=False)
    graph = step_graph(request.graph, request.loss, request.batch)
    found = solve_only(replace(request, memory_limit=173803), graph, Timings())
    assert solve_only(replace(request, memory_limit=173803, worth=found.solution.objective), graph, Timings())


def test_where_steps_are_not_rehearsed_what_counts_too_much_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(requested(small, (2,)), repeats=Repeats(4, 2, accumulates=True, stages=2), shared=SharedWork())
    graph = step_graph(request.graph, request.loss, request.batch)

    def refused(limit: float) -> int:
        with pytest.raises(InfeasibleError) as caught:
            solve_only(replace(request, memory_limit=limit), graph, Timings())
        assert caught.value.needed_bytes is not None
        return caught.value.needed_bytes

    monkeypatch.setattr(fewest_bytes, "solve", lambda *_, **__: pytest.fail("solved"))
    named = refused(1000)
    assert refused(0.5 * named) == named
    monkeypatch.undo()
    found = solve_only(replace(request, memory_limit=1.01 * named), graph, Timings())
    assert found.step.counted.peak <= 1.01 * named


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_what_a_step_in_microbatches_is_said_to_need_is_enough(mesh: tuple[int, ...]) -> None:
    """Such a step holds more than its program counts."""
    request = replace(requested(small, mesh), repeats=Repeats(2, 1, accumulates=True, stages=1), shared=SharedWork())
    graph = step_graph(request.graph, request.loss, request.batch)
    with pytest.raises(InfeasibleError) as caught:
        solve_only(replace(request, memory_limit=1000), graph, Timings())
    needed = caught.value.needed_bytes
    assert needed is not None
    assert peak_bytes(solve_only(replace(request, memory_limit=needed), graph, Timings())) <= needed
