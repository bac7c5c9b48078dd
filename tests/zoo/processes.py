"""Runs plans of a model on local processes and compares each with one process; the model is traced once for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

from autopar.arguments import split_batch
from autopar.cluster.description import Cluster
from autopar.options import Options
from autopar.planner.prepare import Prepared, make_request, prepare
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_only
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan
from autopar.plans.plan import Plan
from autopar.runtime.launch import run_local
from autopar.verification.report import OneStep, judge
from autopar.verification.steps import Task, in_training, one_process, parallel_step
from autopar.verification.tolerance import Closeness

from .models import Maker

Mesh = tuple[int, ...]
Asked = tuple[Mesh, str]


def run_on_processes(
    maker: Maker, meshes: Sequence[Mesh], configurations: Mapping[str, tuple[Cluster, Options]], timeout: float = 200.0
) -> dict[Asked, str]:
    """For every mesh and question ``equal``, or how its plan differs from one process: loss, gradients, or collectives
    that are not those priced. The meshes are of equally many devices, the plans of fixed meshes and without stages."""
    model, batch = maker()
    model, (args, kwargs) = in_training(model), split_batch(batch)
    base = prepare(model, args, kwargs, device="cpu", loss_fn=None)
    tasks: dict[Asked, Task] = {}
    for mesh in meshes:
        for kind, (cluster, options) in configurations.items():
            plan = _solved(make_request(model, base, mesh, cluster, replace(options, seed=0)))
            tasks[mesh, kind] = Task(model, mesh, batch, replace(options, seed=0), cluster, None, plan)
    steps = run_local(_steps, math.prod(meshes[0]), timeout=timeout, args=(base, list(tasks.values())))[0]
    first = next(iter(tasks.values()))
    expected = one_process(first, timeout, any(step.draws for step in steps))
    reports = [judge(step, expected, Closeness(), 0.0) for step in steps]
    outcomes = ["equal" if report.ok and not report.unpriced else str(report) for report in reports]
    return dict(zip(tasks, outcomes, strict=True))


def _solved(request: PlanRequest) -> Plan:
    """The plan on just this mesh, without baselines."""
    graph, timings = step_graph(request.graph, request.loss, request.batch), Timings()
    return make_plan(request, graph, solve_only(request, graph, timings), {}, timings)


def _steps(rank: int, world: int, base: Prepared, tasks: list[Task]) -> list[OneStep]:
    """A step under every plan, on this rank. The model is not traced again: ranks have the parent's trace."""
    with patch("autopar.compiler.calls.prepare", lambda *_args, **_options: base):
        return [parallel_step(rank, world, task) for task in tasks]
