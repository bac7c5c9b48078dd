"""Writes a solved pipeline as a plan."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.placement.predicted import plan_line
from autopar.planner.request import PlanRequest, stage_limits
from autopar.planner.step_graphs import graph_hash, step_graph
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan
from autopar.plans.plan import Plan

from .pipeline import PipelineSolution
from .pipeline_predicted import (
    gradient_values,
    new_nodes,
    new_strategies,
    staged_holdings,
    staged_lines,
    staged_predicted,
)
from .rehearsed_memory import exact_stages, fullest, peak, with_memory


def staged_plan(
    request: PlanRequest, inside: PlanRequest, solution: PipelineSolution, timings: Timings, warning: str = ""
) -> Plan:
    """The plan of a pipeline: the plan of the uncut graph on the mesh inside a stage (``inside``), with the fields that
    stages change."""
    graph = step_graph(request.graph, request.loss, request.batch)
    limits = stage_limits(request, solution.layout.stages, math.prod(solution.layout.mesh))
    rehearsed = exact_stages(solution)
    exact = rehearsed.ranks
    full = solution.breakdown.fullest if exact is None else fullest(exact)
    limited = replace(inside, memory_limit=limits[full])
    base = make_plan(limited, solution.uncut.instance.graph, solution.uncut, {}, timings)
    several = solution.layout.stages > 1
    pipeline = replace(solution.pipeline, limits=limits if request.cluster.groups else ())
    return replace(
        base,
        predicted=staged_predicted(solution) if exact is None else with_memory(staged_predicted(solution), exact),
        lines=staged_lines(solution.breakdown, plan_line),
        strategies={**base.strategies, **new_strategies(solution)},
        nodes={**base.nodes, **new_nodes(solution, base.nodes)},
        gradient_values=gradient_values(solution),
        holdings=staged_holdings(solution) if exact is None else exact[full].holdings,
        stages=solution.layout.stages,
        schedule=solution.pipeline.schedule.name if several else None,
        microbatches=solution.pipeline.schedule.microbatches,
        pipeline=pipeline if exact is None else replace(pipeline, peaks=tuple(map(peak, exact))),
        graph_hash=graph_hash(graph),
        warnings=(*base.warnings, *rehearsed.warnings, *filter(None, [warning])),
    )
