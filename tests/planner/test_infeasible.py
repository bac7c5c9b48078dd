"""The limit that an error names: it is enough, near the least, and the same on any machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.cluster.description import Cluster
from autopar.errors import InfeasibleError
from autopar.options import Options
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.search.best_plan import best_plan
from autopar.search.infeasible import smallest_limit
from autopar.solver import solve
from autopar.solver.highs import Outcome
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
    unknown = Outcome("unknown", np.zeros(0), -np.inf, np.zeros(0))
    monkeypatch.setattr(solve, "smallest", lambda problem: np.array([len(g.cost) - 1 for g in problem.groups]))
    monkeypatch.setattr(solve, "fits", lambda *_: False)
    monkeypatch.setattr(solve, "run", lambda *_: unknown)
    with pytest.raises(InfeasibleError, match="was found within the solver's time, nor one with any other limit"):
        whole(request)
    monkeypatch.setattr(solve, "run", lambda *_: replace(unknown, status="infeasible"))
    with pytest.raises(InfeasibleError, match="is possible at all"):
        whole(request)


def whole(request: PlanRequest) -> None:
    graph = step_graph(request.graph, request.loss, request.batch)
    try:
        solve_mesh(replace(request, memory_limit=1000), graph, Timings())
    except InfeasibleError as error:
        assert "1000 B" in str(error), "what an error says that nobody is shown"
        raise error.explained from error


@pytest.mark.parametrize(("least", "expected"), [(300, 309), (10**6, None), (120, 125)])
def test_only_a_limit_in_which_a_pipeline_was_found_is_named(least: int, expected: int | None) -> None:
    """Of one that holds 100 bytes where there is room, and is found in ``least`` or more."""
    tried = dict[int, int | None]()

    def peak(_: Options, limit: int) -> int | None:
        return tried.setdefault(limit, 100 if limit >= least else None)

    limit = smallest_limit(Options(), peak, 5)
    assert limit == expected and (limit is None or tried[limit] is not None)


@pytest.mark.parametrize("name", ["two devices", pytest.param("two stages", marks=pytest.mark.slow)])
def test_a_busy_machine_names_the_same_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = name == "two stages"
    request = requested(narrow, (2,), stages=2, microbatches=2) if staged else REQUESTS[name]()
    error = refused(request, 1000)
    hurry(monkeypatch)
    assert refused(request, 1000) == error
