"""Writes a solved mesh as a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import Graph
from autopar.ir.plan_record import Predicted
from autopar.offload import IN_TIER
from autopar.passes.annotate.annotate import rule_sources
from autopar.placement.alternatives import explanation_fields
from autopar.placement.axis_names import default_names
from autopar.placement.constraints import module_outputs
from autopar.placement.predicted import plan_line, predicted
from autopar.placement.rooms import Room, seat_of
from autopar.planner.roles.axis_roles import role_names
from autopar.plans.plan import Plan

from .mesh_solution import MeshSolution
from .request import PlanRequest, memory_limit_of
from .step_graphs import graph_hash
from .timings import Timings


def make_plan(
    request: PlanRequest, graph: Graph, best: MeshSolution, priced: Mapping[str, Predicted | None], timings: Timings
) -> Plan:
    """Writes a solution as a plan."""
    instance, solution = best.instance, best.solution
    # The memory of a pipeline is that of its stages.
    rooms, tightest = ((), None) if request.memory_limit is not None else (best.step.rooms, best.step.tightest)
    step_graph, assignment, exact = best.step.placed.graph, best.step.placed.assignment, best.step.memory
    bound = best.breakdown.memory if tightest is None else tightest.memory
    paths = {node.name: node.target for node in graph.placeholders("param")}
    rules = rule_sources(graph, request.mesh)
    fallbacks = tuple(op for op, sources in rules.items() if sources[0].startswith("fallback"))
    fields = explanation_fields(instance, step_graph, solution.choices)
    return Plan(
        model=request.model,
        batch=request.batch,
        mesh=request.mesh,
        axis_names=request.axis_names or role_names(request.roles, default_names(request.mesh, assignment, graph)),
        cluster=request.cluster.name,
        cluster_source=request.cluster.source,
        status="optimal" if solution.status == "optimal" else "feasible",
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap,
        solve_seconds=solution.seconds,
        memory_limit=memory_limit_of(request) if tightest is None else int(tightest.room.limit),
        graph_hash=graph_hash(graph),
        predicted=predicted(best.breakdown, instance, request.cluster, exact.memory or bound),
        lines=tuple(map(plan_line, best.breakdown.lines)),
        strategies=assignment.strategies,
        parameters={paths[name]: place for name, place in assignment.parameters.items()},
        outputs={path: assignment.strategies[name].outputs[0] for path, name in module_outputs(graph).items()},
        tied=dict(request.tied),
        baselines=priced,
        holdings=exact.holdings,
        **fields,
        recomputed=tuple(sorted(best.assignment.recomputed)),
        offloaded=tuple(sorted(best.assignment.offloaded)),
        pinned=dict(request.options.pins),
        fallbacks=fallbacks,
        rules={op: "; ".join(sources) for op, sources in rules.items()},
        warnings=(*request.notes, *_warnings(best, graph, rules), *exact.warnings),
        timings=dict(timings.seconds),
        precision=request.options.precision or "fp32",
        optimizer=request.options.optimizer,
        compile=request.options.compile,
        imbalance=request.options.imbalance,
        device_peaks=_by_device(best, {held.room: held.peak for held in rooms}),
        device_limits=request.rank_limits if rooms else (),
    )


def _by_device(best: MeshSolution, peaks: Mapping[Room, int]) -> tuple[int, ...]:
    """The peak bytes of each device, from those of the rooms."""
    if not peaks:
        return ()
    prices, seats = best.prices, {room.coordinate: peak for room, peak in peaks.items()}
    return tuple(seats[seat_of(device, prices.mesh, prices.shares)] for device in range(prices.devices))


def _warnings(best: MeshSolution, graph: Graph, rules: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for tier in sorted({place.offload for place in best.assignment.parameters.values()} - {""}):
        where = IN_TIER[tier]  # type: ignore[index]
        yield f"optimizer state rests {where}: only an optimizer made by model.optimizer(...) puts it there"
    for op, sources in rules.items():
        for text in sources:
            kind, _, reason = text.partition(": ")
            if kind == "fallback":
                lines = (line for line in best.breakdown.lines if line.kind == "compute" and graph[line.name].op == op)
                seconds = sum(line.seconds for line in lines)
                price = f"{seconds * 1e3:.3g} ms a step"
                yield f"{op} has no sharding rule ({reason}): it runs whole on every device, {price}"
            elif kind == "refuted":
                yield f"{op}: {reason} is registered for it, but proved wrong when executed, and was left out"
            elif kind == "registered, not proven":
                yield f"{op}: the registered sharding rule is trusted, but could not be proven ({reason})"
