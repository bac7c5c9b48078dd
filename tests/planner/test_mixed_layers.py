"""Under a limit of memory some of equal layers save memory, the others do not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.ir.placements import short
from autopar.planner import solve_mesh as planner
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.mixed_layers import _pairs, layer_positions
from autopar.planner.peaks import Peaks
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from autopar.solver.problem import Group, Ints, Problem, Solution, evaluate
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import requested
from tests.helpers.run_plan import Bench

# So wide that weights decide: with 1024 saving memory costs less than the gap of solving.
LAYERS, WIDTH = 12, 2048


class Linears(nn.Module):
    """Equal products, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).square().mean()
        return loss


def linears() -> Case:
    torch.manual_seed(0)
    return Linears(), {"x": torch.randn(64, WIDTH)}


def layers() -> Case:
    return Stack(layers=6, width=64, hidden=256), text(8, 16)


@cache
def unlimited(case: Any, mesh: tuple[int, ...]) -> Plan:
    return best_plan(requested(case, mesh), Timings())


def within(case: Any, mesh: tuple[int, ...], share: float, **options: Any) -> Plan:
    """The plan under so large a share of the peak without a limit."""
    limit = int(share * unlimited(case, mesh).predicted.peak_bytes)
    return best_plan(requested(case, mesh, memory_limit=limit, **options), Timings())


def test_what_a_little_memory_costs_is_little() -> None:
    """Of what it costs that all layers save memory, a limit that is a little short costs a part."""
    free, most = unlimited(linears, (2,)).objective, within(linears, (2,), 0.6).objective
    near = within(linears, (2,), 0.8)
    assert near.predicted.peak_bytes <= 0.8 * unlimited(linears, (2,)).predicted.peak_bytes
    assert near.objective - free <= 0.7 * (most - free)
    assert near.predicted.step_seconds == pytest.approx(near.objective, rel=1e-9)
    assert sum(line.seconds for line in near.lines) == pytest.approx(near.objective, rel=1e-9)


def test_a_plan_with_layers_that_differ_computes_what_one_process_does() -> None:
    plan = within(linears, (2,), 0.8)
    model, batch = linears()
    assert isinstance(batch, dict)
    chosen = {place for path, place in plan.parameters.items() if path.endswith("weight")}
    assert len(chosen) > 1
    bench = Bench(model, batch)
    found, expected = bench.run(plan), bench.expected()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("share", [0.8])
@pytest.mark.parametrize("case", [linears, layers])
def test_solutions_are_priced_as_their_program_and_none_is_worse(
    monkeypatch: pytest.MonkeyPatch, case: Any, share: float
) -> None:
    request = requested(case, (2,))
    graph = step_graph(request.graph, request.loss, request.batch)
    limit = int(share * unlimited(case, (2,)).predicted.peak_bytes)
    request = replace(request, options=replace(request.options, memory_limit=limit))
    best, _ = solve_mesh(request, graph, Timings())
    problem, chosen = best.instance.problem, best.solution.choices
    assert best.step.breakdown.seconds == pytest.approx(best.solution.objective, rel=1e-9)
    assert evaluate(problem, chosen) == pytest.approx(best.solution.objective, rel=1e-9)
    assert Peaks(request).exact(best) <= limit and best.solution.bound <= best.solution.objective

    def tied(_: PlanRequest, __: Graph, best: MeshSolution, known: Iterable[Ints], peaks: Peaks) -> MeshSolution:
        return best

    monkeypatch.setattr(planner, "mix_layers", tied)
    alike, _ = solve_mesh(request, graph, Timings())
    assert best.solution.objective <= alike.solution.objective


def test_layers_are_not_mixed_once_the_time_that_a_user_gives_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timings, "is_up", lambda *_: True)
    monkeypatch.setattr(planner, "mix_layers", lambda *_: pytest.fail("mixed"))
    request = requested(linears, (2,), time_limit=1000.0)
    limit = int(0.8 * unlimited(linears, (2,)).predicted.peak_bytes)
    graph = step_graph(request.graph, request.loss, request.batch)
    best, _ = solve_mesh(replace(request, memory_limit=limit), graph, Timings())
    assert Peaks(replace(request, memory_limit=limit)).exact(best) <= limit


def test_of_large_steps_the_last_layers_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit; the first save memory."""
    monkeypatch.setattr("autopar.planner.mixed_layers.LEAST_NODES", 0)
    monkeypatch.setattr("autopar.planner.solve_mesh.UNTIED_NODES", 0)
    plan, most = within(linears, (2,), 0.8), within(linears, (2,), 0.6)
    assert plan.predicted.peak_bytes <= 0.8 * unlimited(linears, (2,)).predicted.peak_bytes
    assert plan.objective < 0.99 * most.objective
    placed = [plan.parameters[f"net.{2 * layer}.weight"] for layer in range(LAYERS)]
    changes = [layer for layer in range(1, LAYERS) if placed[layer] != placed[layer - 1]]
    saving = {most.parameters[f"net.{2 * layer}.weight"] for layer in range(LAYERS)}
    assert len(changes) == 1 and placed[0] in saving and placed[-1] not in saving


def test_pins_are_kept_and_excluded_memory_savers_stay_so() -> None:
    plan = within(linears, (2,), 0.8, pins={"net.2.weight": "S(1)"})
    assert short(plan.placements["net.2.weight"]) == "(S(1))"
    kept = within(layers, (2,), 0.8, recompute="none", offload=False)
    assert not kept.recomputed and not kept.offloaded and math.isfinite(kept.objective)


@pytest.mark.parametrize(("room", "bases"), [(5.0, [3.0]), (0.5, [3.0, 4.0])])
def test_what_holds_less_is_mixed_where_the_best_leaves_little_room(room: float, bases: list[float]) -> None:
    """Of three choices of 1, 3 and 4 s that hold 9, 4 and 1 bytes."""
    request = requested(linears, (2,))
    graph = step_graph(request.graph, request.loss, request.batch)
    _, program = planner._formulate(request, graph, Timings())
    group = Group("a", np.array([1.0, 3.0, 4.0]), np.array([9.0, 4.0, 1.0]), np.zeros(3), np.zeros(3))
    instance = replace(program, problem=Problem((group,), ()))
    known = [np.array([choice]) for choice in range(3)]
    best = MeshSolution.of(instance, Solution(known[1], 3.0, 0.0, "feasible", 0.0))

    def held(solved: MeshSolution) -> float:
        return float(group.memory[solved.solution.choices[0]])

    peaks: Any = Mock(allowed=4.0 + room, exact=held, about=held)
    tried = [(slow.solution.objective, quick.solution.objective) for slow, quick in _pairs(request, best, known, peaks)]
    assert tried == [(base, 1.0) for base in bases]


def test_positions_of_layers() -> None:
    request = requested(linears, (2,))
    positions = layer_positions(step_graph(request.graph, request.loss, request.batch))
    assert sorted(set(positions.values())) == list(range(2 * LAYERS))
    assert {positions[name] for name in positions if name.startswith("net_22_")} == {22}
