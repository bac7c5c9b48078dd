"""What a step holds at least is no more than its rehearsal finds, however its placements are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.placement.memory_floor import Moment, held_at_least
from autopar.planner import proven_bound
from autopar.planner import solve_mesh as planner
from autopar.planner.formulate import formulate, with_memory_savers
from autopar.planner.memory_limit import Unlimited, with_limit
from autopar.planner.mesh_solution import MeshSolution, peak_bytes
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.solver.coordinate_descent import Neighbourhood, descend
from autopar.solver.problem import Solution, evaluate, memory_of
from autopar.solver.solve import solve
from tests.helpers.marks import slow_rows_but
from tests.helpers.planning import requested

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

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(self.COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_no_step_whose_layers_differ_is_quicker_than_the_bound() -> None:
    """It may have some in shards, and fit so; equal layers that choose alike are all in shards, or none."""
    case = Layers(), (torch.ones(8, 256),)
    request = requested(lambda: case, (2,), cluster="local", recompute="none", offload=False)
    graph = step_graph(request.graph, request.loss, request.batch)
    annotated, program = planner._formulate(request, graph, Timings())
    peak = peak_bytes(planner.solve_mesh(request, graph, Timings())[0])
    apart = with_limit(formulate(request, annotated, program.prices, Layers.COUNT), 0.85 * peak)
    differing = MeshSolution.of(apart, solve(apart.problem, gap=0.01, counted=True))
    limit = int(0.8 * peak)
    assert peak_bytes(differing) <= limit
    short = replace(request, options=replace(request.options, memory_limit=limit))
    assert planner.solve_mesh(short, graph, Timings())[0].solution.bound <= differing.solution.objective
