"""A solved pipeline as a plan."""

from __future__ import annotations

from dataclasses import replace

from autopar.placement.predicted import plan_line
from autopar.planner.request import PlanRequest, memory_limit_of
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
    request: PlanRequest, inside: PlanRequest, made: PipelineSolution, timings: Timings, warning: str = ""
) -> Plan:
    """The plan of a pipeline: that of the uncut graph on the mesh inside a stage (``inside``), and what staging
    changes."""
    graph = step_graph(request.graph, request.loss, request.batch)
    limited = replace(inside, memory_limit=memory_limit_of(request))
    base = make_plan(limited, made.whole.instance.graph, made.whole, {}, timings)
    several = made.layout.stages > 1
    rehearsed = exact_stages(made)
    exact = rehearsed.ranks
    return replace(
        base,
        predicted=staged_predicted(made) if exact is None else with_memory(staged_predicted(made), exact),
        lines=staged_lines(made.breakdown, plan_line),
        strategies={**base.strategies, **new_strategies(made)},
        nodes={**base.nodes, **new_nodes(made, base.nodes)},
        gradient_values=gradient_values(made),
        holdings=staged_holdings(made) if exact is None else exact[fullest(exact)].holdings,
        stages=made.layout.stages,
        schedule=made.pipeline.schedule.name if several else None,
        microbatches=made.pipeline.schedule.microbatches,
        pipeline=made.pipeline if exact is None else replace(made.pipeline, peaks=tuple(map(peak, exact))),
        graph_hash=graph_hash(graph),
        warnings=(*base.warnings, *rehearsed.warnings, *filter(None, [warning])),
    )
