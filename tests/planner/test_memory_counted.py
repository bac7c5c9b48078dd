"""Plans where memory is short: the program counts bytes from above, and the quickest step that fits is found all the
same, with a bound of everything that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.cluster.description import Cluster, Group
from autopar.planner import solve_mesh as planner
from autopar.planner.fewest_bytes import minimize_memory
from autopar.planner.memory_limit import Needed, first_limit, next_limit
from autopar.planner.mesh_solution import MeshSolution, peak_bytes
from autopar.planner.peaks import Peaks
from autopar.planner.request import PlanRequest, memory_limit_of
from autopar.planner.row_shares import Division, on_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.planner.within_memory import MetSolutions
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from autopar.solver.problem import memory_of
from autopar.solver.solve import solve
from tests.helpers.marks import slow_but
from tests.helpers.models import Case
from tests.helpers.planning import requested

WEIGHTS = ("net.0.weight", "net.2.weight")
EQUAL: tuple[Division, ...] = (((2,), ()),)
SHARES = ((1, 2), (5, 7), (1, 3))


class Pictures(nn.Module):
    """Small weights beside large activations: to gather a weight takes long and saves little memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 13, 3, padding=1, bias=False), nn.Conv2d(13, 13, 3, padding=1, bias=False)
        self.net = nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).square().mean()
        return loss


def pictures() -> Case:
    return Pictures(), {"x": torch.randn(12, 3, 33, 33)}


def asked(*memory: int, **options: Any) -> PlanRequest:
    """A request for two local processes without a reserve, which have so many bytes each if these are given."""
    cluster = Cluster.get("local")
    device = replace(cluster.device, reserve_fraction=0.0)
    cluster = replace(cluster, device=device)
    if memory:
        cluster = cluster.with_groups(*(Group(1, replace(device, memory_bytes=each)) for each in memory))
    return requested(pictures, (2,), cluster, recompute="none", offload=False, **options)


def alternatives(request: PlanRequest, divisions: Sequence[Division]) -> Iterator[MeshSolution]:
    """The quickest steps without a limit: for each division of the rows, every way to keep weights whole or divided."""
    graph = step_graph(request.graph, request.loss, request.batch)
    for division, places in product(divisions, product(("R", "S(0)"), repeat=len(WEIGHTS))):
        pins = dict(zip(WEIGHTS, places, strict=True))
        for shares in division[1]:
            pins["net.0"] = f"S(0:{'+'.join(map(str, shares))})"
        inside = on_mesh(replace(request, options=replace(request.options, pins=pins)), division)
        _, program = planner._formulate(inside, graph, Timings())
        yield MeshSolution.of(program, solve(program.problem, counted=True))


@cache
def equal() -> tuple[MeshSolution, ...]:
    """The alternatives on equal devices, the quickest first."""
    return tuple(sorted(alternatives(asked(), EQUAL), key=lambda each: each.solution.objective))


def counted(solved: MeshSolution) -> float:
    return memory_of(solved.instance.problem, solved.solution.choices)


def check(plan: Plan, request: PlanRequest, known: Sequence[MeshSolution]) -> None:
    """``plan`` is as quick as any of what is ``known`` and fits, and its bound holds for all of these."""
    limit, seconds = memory_limit_of(request), plan.predicted.step_seconds
    fitting = [each for each in known if peak_bytes(each) <= limit]
    best = min(fitting, key=lambda each: each.solution.objective)
    assert counted(best) > limit, "the program would have found it with the limit of the device"
    assert seconds <= best.solution.objective * (1 + request.options.gap)
    assert 0 < plan.bound <= min(seconds, best.solution.objective) * (1 + 1e-9)
    assert plan.gap == pytest.approx(1 - plan.bound / plan.objective, abs=1e-9)
    assert (plan.status == "optimal") == (plan.gap <= request.options.gap)


@pytest.mark.parametrize("place", slow_but([0, 1], range(len(WEIGHTS) ** 2)))
def test_the_quickest_step_that_fits_is_found_on_equal_devices(place: int) -> None:
    """With no byte to spare for one of the alternatives."""
    limit = peak_bytes(equal()[place])
    request = asked(memory_limit=limit)
    plan = best_plan(request, Timings())
    assert plan.predicted.peak_bytes <= limit == plan.memory_limit
    check(plan, request, equal())
    if place == 0:
        assert plan.status == "optimal"


@pytest.mark.slow
def test_the_quickest_step_that_fits_is_found_on_unequal_devices() -> None:
    """The first has just enough memory for a third of the rows and all weights."""
    even = peak_bytes(equal()[0])
    (third,) = (room.peak for room in next(alternatives(asked(even, 2 * even), [((2,), ((1, 2),))])).step.rooms[:1])
    assert third < 0.5 * even
    request = asked(third, int(1.6 * even))
    plan = best_plan(request, Timings())
    assert any(plan.shares) and plan.device_limits == (third, int(1.6 * even))
    assert all(peak <= limit for peak, limit in zip(plan.device_peaks, plan.device_limits, strict=True))
    known = alternatives(request, (*EQUAL, *(((2,), (shares,)) for shares in SHARES)))
    check(plan, request, list(known))


@given(
    st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6)
)
def test_the_next_limit_lies_between_what_fits_and_what_does_not(
    allowed: int, spare: int, over: int, between: int, excess: int
) -> None:
    within = Needed(allowed + excess, allowed - spare)
    beyond = Needed(within.counted + between, allowed + over)
    found = next_limit(allowed, beyond, within)
    assert min(within.counted, beyond.counted - 1) <= found <= beyond.counted - 1
    assert next_limit(allowed, beyond, None) < beyond.counted
    assert next_limit(allowed, None, within) == within.counted + spare
    assert next_limit(allowed, None, None) == allowed == first_limit(allowed, None)
    # A step that is not rehearsed needs what the program counts.
    assert first_limit(allowed, Needed(allowed + over, allowed + over)) == allowed


def test_what_a_solver_met_is_taken_if_it_fits_and_is_quicker() -> None:
    request, met = asked(), MetSolutions()
    _, program = planner._formulate(request, step_graph(request.graph, request.loss, request.batch), Timings())
    run = met.recorded(lambda instance, starts: solve(instance.problem, incumbents=starts, counted=True))
    least = minimize_memory(program)
    assert least is not None
    quickest = MeshSolution.of(program, run(program, [least.solution.choices]))
    assert quickest.solution.choices.tobytes() in met.known and least.solution.choices.tobytes() in met.known
    assert peak_bytes(least) < peak_bytes(quickest)
    found = met.quickest(least, Peaks(request))
    assert found.solution.objective == pytest.approx(quickest.solution.objective, rel=request.options.gap)
    short = replace(request, options=replace(request.options, memory_limit=peak_bytes(least)))
    assert met.quickest(least, Peaks(short)).solution.objective == least.solution.objective
    between = replace(request, options=replace(request.options, memory_limit=peak_bytes(quickest) - 1))
    fitting = met.quickest(least, Peaks(between))
    assert peak_bytes(fitting) < peak_bytes(quickest)
    assert fitting.solution.objective <= least.solution.objective


def test_all_that_a_solver_met_fits_and_ends_with_the_cheapest() -> None:
    request = asked()
    _, program = planner._formulate(request, step_graph(request.graph, request.loss, request.batch), Timings())
    found = solve(program.problem, counted=True)
    assert any((met == found.choices).all() for met in found.met)
    assert all(memory_of(program.problem, met) <= program.problem.memory_limit for met in found.met)
