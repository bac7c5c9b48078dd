"""What a step holds at least is no more than its rehearsal finds, however its placements are chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.placement.formulation import copies_of
from autopar.placement.memory_floor import Moment, held_at_least
from autopar.planner import proven_bound
from autopar.planner import solve_mesh as planner
from autopar.planner.formulate import formulate, with_memory_savers
from autopar.planner.memory_limit import Unlimited, with_limit
from autopar.planner.mesh_solution import MeshSolution, peak_bytes
from autopar.planner.request import memory_limit_of
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.solver.budget import Budget
from autopar.solver.coordinate_descent import Neighbourhood, descend
from autopar.solver.overlap_prices import at_prices
from autopar.solver.problem import Solution, evaluate, memory_of
from autopar.solver.solve import solve
from autopar.solver.untied_dual import untied_bound
from tests.helpers.marks import slow_but, slow_rows_but
from tests.helpers.models import Case, make
from tests.helpers.planning import requested
from tests.helpers.stacks import Skips

MOMENTS: tuple[Moment, ...] = ("forward", "backward")
MODELS = ("gpt2", "llama", "bert", "vit", "resnet", "plain")


@pytest.mark.parametrize(
    ("name", "compiled"), slow_rows_but([0], [("llama", True), *((name, False) for name in MODELS)])
)
def test_no_step_holds_less(name: str, compiled: bool) -> None:
    """Of choices at random, brought to finite costs at several prices of memory."""
    options: dict[str, Any] = {"precision": "bf16" if compiled else None, "compile": compiled}
    request = requested(name, (2, 2), **options)
    _, program = planner._formulate(request, step_graph(request.graph, request.loss, request.batch), Timings())
    wide = with_memory_savers(request, program)
    floors, draw = [held_at_least(wide, moment) for moment in MOMENTS], np.random.default_rng(0)
    neighbourhood, tried, nearest = Neighbourhood.of(wide.problem), 0, 0.0
    for price in (0.0, 1e-10, 1e-8, 0.0):
        start = np.array([draw.integers(len(group.cost)) for group in wide.problem.groups], dtype=np.int64)
        choices = descend(neighbourhood, start, price)
        if not np.isfinite(evaluate(wide.problem, choices)):
            continue
        solved = MeshSolution.of(wide, Solution(choices, evaluate(wide.problem, choices), 0.0, "feasible", 0.0))
        least, peak = max(memory_of(floor, choices) for floor in floors), peak_bytes(solved)
        assert solved.step.memory.memory is not None, "rehearsed"
        assert least <= peak
        tried, nearest = tried + 1, max(nearest, least / peak)
    assert tried >= 2
    assert nearest > 0.6, "not far below either"


def test_where_memory_is_short_the_bound_is_above_that_without_a_limit() -> None:
    """Though the program with a limit, which counts from above, proves nothing."""
    request = requested("plain", (2, 2), recompute="none", offload=False)
    _, program = planner._formulate(request, step_graph(request.graph, request.loss, request.batch), Timings())
    found = solve(program.problem, counted=True)
    wide = with_memory_savers(request, program)
    least = max(memory_of(held_at_least(wide, moment), found.choices) for moment in MOMENTS)
    short = replace(request, options=replace(request.options, memory_limit=int(0.75 * least)))
    best = MeshSolution.of(program, replace(found, objective=2.0 * found.objective))
    bound = proven_bound._bound_of_what_fits(short, best, Unlimited(program, found), Timings())
    assert found.bound < bound < best.solution.objective


class Layers(nn.Module):
    """Equal layers with more weights than anything else."""

    COUNT = 6

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(self.COUNT)
        )
        for layer in self.layers if shared else ():
            layer[0].weight = self.layers[0][0].weight  # type: ignore[index,union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def short_of_memory(model: nn.Module, part: float) -> tuple[Any, MeshSolution, MeshSolution]:
    """A request with a ``part`` of the memory that the quickest step of ``model`` holds, its solution, and one that
    fits whose layers differ."""
    case = model, (torch.ones(8, 256),)
    request = requested(lambda: case, (2,), cluster="local", recompute="none", offload=False)
    graph = step_graph(request.graph, request.loss, request.batch)
    annotated, program = planner._formulate(request, graph, Timings())
    peak = peak_bytes(planner.solve_mesh(request, graph, Timings())[0])
    limit = int(part * peak)
    for counted in (0.10, 0.05, 0.0, -0.05, -0.1):
        apart = with_limit(formulate(request, annotated, program.prices, Layers.COUNT), (part + counted) * peak)
        differing = MeshSolution.of(apart, solve(apart.problem, gap=0.01, counted=True))
        if differing.solution.status != "infeasible" and peak_bytes(differing) <= limit:
            break
    short = replace(request, options=replace(request.options, memory_limit=limit))
    return short, planner.solve_mesh(short, graph, Timings())[0], differing


@pytest.mark.parametrize("part", slow_but([0.8], [0.9, 0.8, 0.7]))
def test_no_step_whose_layers_differ_is_quicker_than_the_bound(part: float) -> None:
    """It may have some in shards, and fit so; equal layers that choose alike are all in shards, or none."""
    short, solved, differing = short_of_memory(Layers(), part)
    assert peak_bytes(differing) <= memory_limit_of(short)
    assert solved.solution.bound <= differing.solution.objective
    assert solved.solution.bound > 1.1 * solved.unlimited, "it counts some of what memory costs"


UNTIED: Mapping[str, Callable[[], Case]] = {
    "linears": lambda: (Layers(), (torch.ones(8, 256),)),
    "one weight": lambda: (Layers(shared=True), (torch.ones(8, 256),)),
    "attention": partial(make, "gpt2"),
    "skips": lambda: (Skips(), (torch.ones(4, 6),)),
}


@pytest.mark.parametrize(
    ("name", "recompute"), slow_rows_but([0], [(name, recompute) for name in UNTIED for recompute in ("none", None)])
)
def test_the_bound_of_copies_holds_where_every_node_chooses_by_itself(name: str, recompute: Any) -> None:
    """Against what is found of the program in which no layers are tied."""
    options = {"recompute": recompute} | ({"offload": False} if recompute else {})
    request = requested(UNTIED[name], (2, 2), cluster="local", **options)
    annotated, program = planner._formulate(request, step_graph(request.graph, request.loss, request.batch), Timings())
    wide = with_memory_savers(request, program)
    apart = with_memory_savers(request, formulate(request, annotated, program.prices, 64))
    assert len(apart.names) > len(wide.names)
    for moment in MOMENTS:
        alike, differing = held_at_least(wide, moment), held_at_least(apart, moment)
        quickest = solve(replace(differing, memory_limit=np.inf), time_limit=3, counted=True)
        for part in (0.9, 0.6):
            limit = part * memory_of(differing, quickest.choices)
            found = solve(replace(differing, memory_limit=limit), time_limit=3, counted=True)
            for price in (0.0, 1.0):
                plain = replace(at_prices(alike, [price] * len(alike.windows)), memory_limit=limit)
                enough = 10.0 * min(found.objective, 1e3 * quickest.objective)
                bound = untied_bound(plain, copies_of(wide), enough=enough, budget=Budget(0.5, True))
                assert bound <= found.objective * (1 + 1e-9)
