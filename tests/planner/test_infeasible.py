"""The limit that an error names: it is enough, near the least, and the same on any machine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.cluster.description import Cluster
from autopar.errors import InfeasibleError
from autopar.options import Options
from autopar.planner.memory_advice import AdviceBudget
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.search import best_plan as best_plan_module
from autopar.search.best_plan import best_plan
from autopar.search.infeasible import pipeline_infeasible, smallest_limit
from autopar.search.restricted.never_fits import least_at_rest, never_fits
from autopar.search.stage_meshes import StageLayout
from autopar.solver import solve
from tests.helpers.marks import slow_but
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import requested
from tests.solver.test_budget import hurry


def one_layer() -> Case:
    return Stack(layers=1, width=16, hidden=32), text(8, 8)


def narrow() -> Case:
    return Stack(layers=2, width=16, hidden=32), text(8, 8)


def two_layers() -> Case:
    return Stack(layers=2, width=32, hidden=128), text(4, 4)


REQUESTS: dict[str, Callable[[], PlanRequest]] = {
    "one device": lambda: requested(two_layers, (1,)),
    "two devices": lambda: requested(one_layer, (2,), recompute="none"),
}


def refused(request: PlanRequest, limit: int) -> str:
    options = replace(request.options, memory_limit=limit)
    with pytest.raises(InfeasibleError) as caught:
        best_plan(replace(request, options=options), Timings())
    return str(caught.value)


def named(error: str) -> int:
    found = re.search(r"Options\(memory_limit=(\d+)\)", error)
    assert found is not None, error
    return int(found[1])


def enough(request: PlanRequest) -> int:
    """The limit that the error names, in which the same request has a plan."""
    limit = named(refused(request, 1000))
    plan = best_plan(replace(request, options=replace(request.options, memory_limit=limit)), Timings())
    assert plan.predicted.peak_bytes <= limit
    return limit


@pytest.mark.parametrize("name", slow_but(["one device"], REQUESTS))
def test_the_limit_that_is_named_is_enough_and_less_is_not(name: str) -> None:
    request = REQUESTS[name]()
    limit = enough(request)
    assert named(refused(request, int(0.9 * limit))) == limit


@pytest.mark.slow
def test_the_limit_that_is_named_is_enough_for_a_solver_that_is_cut_off() -> None:
    assert enough(requested("plain", (2,), Cluster.get("local"), time_limit=2.0))


def test_what_was_not_found_is_not_called_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    request = REQUESTS["two devices"]()
    monkeypatch.setattr(solve, "fits", lambda *_: False)
    monkeypatch.setattr(solve, "least_memory", lambda *_: (None, False))
    with pytest.raises(InfeasibleError, match="was found within the solver's time, nor one with any other limit"):
        whole(request)
    monkeypatch.setattr(solve, "least_memory", lambda *_: (None, True))
    with pytest.raises(InfeasibleError, match="is possible at all"):
        whole(request)


def whole(request: PlanRequest) -> None:
    graph = step_graph(request.graph, request.loss, request.batch)
    try:
        solve_mesh(replace(request, memory_limit=1000), graph, Timings())
    except InfeasibleError as error:
        assert "1000 B" in str(error), "what an error says that nobody is shown"
        raise error.explained from error


@pytest.mark.parametrize(
    ("least", "start", "expected"),
    [(300, None, 384), (10**6, None, None), (120, None, 157), (100, None, 100), (90, 100, 90), (70, 100, 80)],
)
def test_only_a_limit_in_which_a_pipeline_was_found_is_named(
    least: int, start: int | None, expected: int | None
) -> None:
    """Of one that holds 100 bytes where there is room, and is found in ``least`` or more."""
    tried = dict[int, int | None]()

    def peak(_: Options, limit: int) -> int | None:
        return tried.setdefault(limit, 100 if limit >= least else None)

    budget = AdviceBudget(5)
    found = smallest_limit(Options(), peak, budget, start)
    limit = None if found is None else found.bytes
    assert limit == expected and (limit is None or tried[limit] is not None)
    assert len(tried) <= 5 and (expected is not None or "Not searched" in budget.remark)


@pytest.mark.parametrize(("asked", "says"), [(None, True), (2, False)])
def test_a_limit_for_stages_is_of_so_many_microbatches(asked: int | None, says: bool) -> None:
    request = requested(narrow, (2,), stages=2, microbatches=asked)
    layout = StageLayout(2, (1,), (0,))
    error = pipeline_infeasible(request, layout, 2, 100, lambda *_: 100, AdviceBudget(5))
    assert error is not None and "With 2 microbatches" in str(error)
    assert ("Other numbers of microbatches, not searched, may need less." in str(error)) is says


def test_pipelines_that_count_more_than_they_hold_are_not_tried_twice() -> None:
    """Each counts 60 bytes more than its limit, and fits as measured."""
    tried = list[int]()

    def peak(_: Options, limit: int) -> int | None:
        tried.append(limit)
        return limit + 60 if limit >= 100 else None

    found = smallest_limit(Options(), peak, AdviceBudget(12), 200, 70)
    assert found is not None and found.is_least and 100 <= found.bytes <= 115
    assert len(set(tried)) == len(tried)


@pytest.mark.slow
def test_the_limit_that_is_named_for_stages_is_enough_and_less_is_not() -> None:
    request = requested(narrow, (2,), stages=2, microbatches=2)
    found = re.search(r"(\d+) bytes \(.* are enough, .*Options\(memory_limit=(\d+), ", refused(request, 77_000))
    assert found is not None and found[1] == found[2]
    limit = int(found[1])
    plan = best_plan(replace(request, options=replace(request.options, memory_limit=limit)), Timings())
    assert plan.predicted.peak_bytes <= limit
    refused(request, int(0.9 * limit))


@pytest.mark.parametrize("start", [None, 400, 90, 1000, 3000])
@pytest.mark.parametrize("searches", [3, 6, 12])
def test_the_limit_of_a_pipeline_that_is_named_is_near_the_least(searches: int, start: int | None) -> None:
    """Of pipelines that hold less, the less they may, down to 100 bytes; but only half of what a generous limit is."""
    tried = dict[int, int | None]()

    def peak(_: Options, limit: int) -> int | None:
        return tried.setdefault(limit, None if limit < 100 else min(max(100, limit // 2), 1000))

    budget = AdviceBudget(searches)
    found = smallest_limit(Options(), peak, budget, start)
    assert found is not None and tried[found.bytes] is not None and len(tried) <= searches
    assert not found.is_least or found.bytes <= 100 / 0.9
    assert found.is_least or searches < 12


def test_advice_ends_with_the_time_that_a_user_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, endless = (AdviceBudget.of(Options(time_limit=limit), 10, 2, 8.0) for limit in (10.0, None))
    assert budget.allows("first") and endless.allows("first")
    begun = time.process_time()
    monkeypatch.setattr(time, "process_time", lambda: begun + 3.0)
    assert not budget.allows("second") and budget.skipped == ["second"] and "second" in budget.remark
    assert endless.allows("second") and endless.remark == ""


def test_what_rests_proves_that_nothing_fits_before_anything_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    request = requested(two_layers, (4,), offload=False)
    parameters = sum(int(node.stored.bytes) for node in request.graph.placeholders("param"))
    assert least_at_rest(request) == 4 * parameters / 4
    options = replace(request.options, memory_limit=least_at_rest(request) - 1)
    assert never_fits(replace(request, options=options))
    assert not never_fits(replace(request, options=replace(options, memory_limit=least_at_rest(request))))
    monkeypatch.setattr(best_plan_module, "with_stages", lambda *_: pytest.fail("pipelines are tried"))
    error = refused(request, least_at_rest(request) - 1)
    assert "mesh (4,)" in error and f"{named(error) - least_at_rest(request) + 1} (" in error
    assert "_rest " not in error


@pytest.mark.parametrize("sharded", [True, False])
def test_no_plan_holds_less_than_what_rests(sharded: bool) -> None:
    request = requested(two_layers, (4,), offload=False, zero=3 if sharded else 0)
    assert least_at_rest(request) <= best_plan(request, Timings()).predicted.peak_bytes


@pytest.mark.parametrize("name", ["two devices", pytest.param("two stages", marks=pytest.mark.slow)])
def test_a_busy_machine_names_the_same_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = name == "two stages"
    request = requested(narrow, (2,), stages=2, microbatches=2) if staged else REQUESTS[name]()
    error = refused(request, 1000)
    hurry(monkeypatch)
    assert refused(request, 1000) == error
