"""Writes a solved pipeline as a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.cluster.description import Cluster
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.node import RECOMPUTED
from autopar.ir.plan_record import Alternatives, PlanNode
from autopar.placement.predicted import plan_line
from autopar.placement.rooms import seat_of
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import PlanRequest, stage_limits
from autopar.planner.step_graphs import graph_hash, step_of
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan
from autopar.plans.plan import Plan

from .pipeline_predicted import (
    gradient_values,
    new_nodes,
    new_strategies,
    staged_holdings,
    staged_lines,
    staged_predicted,
)
from .pipeline_solution import PipelineSolution
from .rehearsed_memory import ExactStages, exact_stages, fullest, peak, with_memory


def staged_plan(
    request: PlanRequest, inside: PlanRequest, solution: PipelineSolution, timings: Timings, warning: str = ""
) -> Plan:
    """The plan of a pipeline: the plan of the uncut graph on the mesh inside a stage (``inside``), with the fields that
    stages change."""
    graph = step_of(request)
    rehearsed = exact_stages(solution)
    exact, limits = rehearsed.ranks, _limits(request, solution, rehearsed)
    full = solution.breakdown.fullest if exact is None else fullest(exact)
    tightest = rehearsed.tightest(full)
    bounds = staged_holdings(solution) if tightest is None else tightest.exact.holdings
    limited = replace(inside, memory_limit=limits[full])
    base = _of_meshes(limited, solution, timings)
    several = solution.layout.stages > 1
    pipeline = replace(solution.pipeline, limits=limits if request.cluster.groups else ())
    return replace(
        base,
        predicted=with_memory(staged_predicted(solution), rehearsed, full),
        lines=staged_lines(solution.breakdown, plan_line),
        strategies={**base.strategies, **new_strategies(solution)},
        nodes={**base.nodes, **new_nodes(solution, base.nodes)},
        gradient_values=gradient_values(solution),
        holdings=bounds if exact is None else exact[full].holdings,
        stages=solution.layout.stages,
        schedule=solution.pipeline.schedule.name if several else None,
        microbatches=solution.pipeline.schedule.microbatches,
        pipeline=replace(pipeline, peaks=_peaks(solution, rehearsed)),
        graph_hash=graph_hash(graph),
        warnings=(*base.warnings, *rehearsed.warnings, *_mixed(request.cluster, solution), *filter(None, [warning])),
        **(_by_device(solution, rehearsed, limits) if rehearsed.has_rooms else {}),
    )


def _mixed(cluster: Cluster, solution: PipelineSolution) -> Iterator[str]:
    """A note on stages of their own sizes that mix kinds of devices: these have equal rows."""
    if not solution.layout.is_unequal or not cluster.groups:
        return
    runs = [
        [len(list(alike)) for _, alike in itertools.groupby(block, key=lambda rank: cluster.at(rank, 1).device)]
        for block in solution.layout.blocks
    ]
    mixed = [str(stage) for stage, sizes in enumerate(runs) if len(sizes) > 1]
    if mixed:
        whose = f"stages {' and '.join(mixed)}" if len(mixed) > 1 else f"stage {mixed[0]}"
        apart = tuple(itertools.chain.from_iterable(runs))
        yield (
            f"devices of several kinds share {whose}, with equal rows, and wait for the slowest: stages={apart} keeps "
            "kinds apart, and stages of as many devices each may have rows in proportion to speed"
        )


def _limits(request: PlanRequest, solution: PipelineSolution, rehearsed: ExactStages) -> tuple[int, ...]:
    """By pipeline rank, what its devices may hold; of several rooms, those in the tightest."""
    tightest = [rehearsed.tightest(rank) for rank in range(solution.layout.stages)]
    limits = stage_limits(request, solution.layout.blocks)
    return tuple(limit if held is None else int(held.room.limit) for limit, held in zip(limits, tightest, strict=True))


def _peaks(solution: PipelineSolution, rehearsed: ExactStages) -> tuple[int, ...]:
    """By pipeline rank, the peak bytes of its devices; of several rooms, of those in the tightest."""
    exact = solution.breakdown.peaks if rehearsed.ranks is None else map(peak, rehearsed.ranks)
    tightest = (rehearsed.tightest(rank) for rank in range(solution.layout.stages))
    return tuple(found if held is None else held.peak for found, held in zip(exact, tightest, strict=True))


def _by_device(solution: PipelineSolution, rehearsed: ExactStages, limits: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a plan that say what each device holds, and what it may hold."""
    held: list[tuple[int, int]] = []
    for rank, prices in enumerate(solution.prices):
        rooms = {each.room.coordinate: (each.peak, int(each.room.limit)) for each in rehearsed.rooms[rank]}
        alike = _peaks(solution, rehearsed)[rank], limits[rank]
        seats = (seat_of(device, prices.mesh, prices.shares) for device in range(prices.devices))
        held += [rooms.get(seat, alike) for seat in seats]
    peaks, within = zip(*held, strict=True)
    return {"device_peaks": peaks, "device_limits": within}


def _of_meshes(request: PlanRequest, solution: PipelineSolution, timings: Timings) -> Plan:
    """The plan of the uncut graph, on the largest mesh, with the choices of the other meshes where they are taken.
    Objective and bound are those of the program on that mesh, the gap the largest of any. ``request``: for that
    mesh."""
    base = _plan_of(request, solution.uncut, timings)
    if not solution.pipeline.meshes:
        return base
    owns = list({id(own): own for own in solution.solutions}.values())
    plans = [base if own is solution.uncut else _plan_of(request, own, timings) for own in owns]
    parts = [(plan, own, _names(solution, own)) for own, plan in zip(owns, plans, strict=True)]
    recomputed = {name for _, own, names in parts for name in own.assignment.recomputed if name in names}
    alternatives, tied = dict[str, Alternatives](), dict[str, str]()
    for plan, _, names in parts:
        roots = _roots(plan, names)
        tied |= {name: roots[node.tied or name] for name, node in plan.nodes.items() if name in names}
        alternatives |= {root: plan.alternatives[key] for key, root in roots.items() if key in plan.alternatives}
    chosen = {**base.strategies, **new_strategies(solution)}
    nodes = {
        name: replace(node, tied="" if tied.get(name) == name else tied.get(name, ""))
        for name, node in _merged([plan.nodes for plan, _, _ in parts]).items()
        if not _is_left_out(name, recomputed)
    }
    return replace(
        base,
        mesh=solution.uncut.prices.mesh,
        status="optimal" if all(plan.status == "optimal" for plan, _, _ in parts) else "feasible",
        gap=max(plan.gap for plan, _, _ in parts),
        solve_seconds=sum(plan.solve_seconds for plan, _, _ in parts),
        strategies={name: s for name, s in chosen.items() if name in nodes or name in recomputed},
        parameters=_parameters(solution),
        outputs={path: chosen[name].outputs[0] for path, name in base.module_nodes.items() if path in base.outputs},
        alternatives=alternatives,
        nodes=nodes,
        recomputed=tuple(sorted(recomputed)),
        offloaded=tuple(sorted(name for _, own, names in parts for name in own.assignment.offloaded if name in names)),
        warnings=tuple(dict.fromkeys(warning for plan, _, _ in parts for warning in plan.warnings)),
    )


def _plan_of(request: PlanRequest, own: MeshSolution, timings: Timings) -> Plan:
    return make_plan(replace(request, mesh=own.prices.mesh), own.instance.graph, own, {}, timings)


def _names(solution: PipelineSolution, own: MeshSolution) -> set[str]:
    """The nodes of all chunks on ranks with this solution, and what these would save if they did not recompute it."""
    ranks = {rank for rank, other in enumerate(solution.solutions) if other is own}
    placement = solution.pipeline.schedule.placement
    chunks = (chunk for chunk in solution.breakdown.chunks if placement[chunk.index] in ranks)
    names = {node.name for chunk in chunks for node in chunk.graph.nodes if node.op != "receive"}
    return names | {name.removesuffix(RECOMPUTED) for name in names}


def _is_left_out(name: str, recomputed: set[str]) -> bool:
    """Whether this is the copy of a node that its own stage does not recompute."""
    return name.endswith(RECOMPUTED) and name.removesuffix(RECOMPUTED) not in recomputed


def _merged(several: list[Mapping[str, PlanNode]]) -> dict[str, PlanNode]:
    """All nodes of several plans. Only copies differ: each comes after the node that precedes it in its own plan."""
    found = {name: node for nodes in reversed(several) for name, node in nodes.items()}
    order = dict.fromkeys(_interleaved([list(nodes) for nodes in several]))
    return {name: found[name] for name in order}


def _interleaved(lists: list[list[str]]) -> Iterator[str]:
    """The names of all lists; what only some have comes before the next name that all have."""
    common = set(lists[0]).intersection(*lists[1:])
    at = [0] * len(lists)
    while any(position < len(names) for position, names in zip(at, lists, strict=True)):
        for index, names in enumerate(lists):
            while at[index] < len(names) and names[at[index]] not in common:
                yield names[at[index]]
                at[index] += 1
        here = {names[position] for position, names in zip(at, lists, strict=True) if position < len(names)}
        yield from here
        at = [position + 1 for position in at]


def _roots(plan: Plan, names: set[str]) -> dict[str, str]:
    """For each node after which others are named that choose alike, the first of these on this mesh."""
    roots: dict[str, str] = {}
    for name, node in plan.nodes.items():
        if name in names:
            roots.setdefault(node.tied or name, name)
    return roots


def _parameters(solution: PipelineSolution) -> dict[str, ParameterPlacement]:
    """Where the first chunk that uses each parameter, which stores it, has it."""
    found: dict[str, ParameterPlacement] = {}
    for chunk in solution.breakdown.chunks:
        for node in chunk.graph.placeholders("param"):
            found.setdefault(node.target, chunk.assignment.parameters[node.name])
    return found
