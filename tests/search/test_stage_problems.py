"""The programs of a pipeline's stages: which are asked for what."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir.graph import Graph
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_only
from autopar.planner.timings import Timings
from autopar.search import stage_problems
from tests.search.test_best_plan import plan

ASKED: dict[str, Any] = {"stages": 4, "microbatches": 4, "schedule": "1f1b"}


@pytest.mark.parametrize("most_nodes", [0, 10_000])
def test_average_stages_of_large_graphs_save_no_memory(monkeypatch: pytest.MonkeyPatch, most_nodes: int) -> None:
    solved: list[PlanRequest] = []

    def recorded(request: PlanRequest, graph: Graph, timings: Timings) -> MeshSolution:
        solved.append(request)
        return solve_only(request, graph, timings)

    free = plan((4,), batch=32, **ASKED)
    monkeypatch.setattr(stage_problems, "solve_only", recorded)
    monkeypatch.setattr(stage_problems, "MOST_NODES", most_nodes)
    limit = int(0.9 * free.predicted.peak_bytes)
    tight = plan((4,), batch=32, memory_limit=limit, **ASKED)
    assert tight.predicted.peak_bytes <= limit
    average, fullest = solved[0], solved[-1]
    assert average.repeats.in_flight < 4
    assert average.only_quickest == (most_nodes == 0)
    assert not fullest.only_quickest
