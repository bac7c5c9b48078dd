"""The best plan there is: with stages or without, on every way to lay the devices out.

A plan without stages is sought first; pipelines are then tried where they could win (:mod:`.attempts`).
``Options(stages=..., microbatches=..., schedule=...)`` fixes any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.plan_record import Predicted
from autopar.placement.predicted import predicted
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import PlanRequest, mesh_candidates
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan
from autopar.plans.plan import Plan
from autopar.plans.views.idle_axes import idle_devices

from .candidate import Candidate, named_axes
from .pipelines import with_stages
from .segments import stage_pins
from .stage_meshes import StageLayout

# Pipelines of processes that share cores took up to this many times their price, relative to plans without stages
# (benchmarks/results/two_hosts.json, pipeline_plans.json).
SHARED_CORES_SAFETY_FACTOR = 1.2


def best_plan(request: PlanRequest, timings: Timings) -> Plan:
    """The best plan for ``request``.

    Raises:
        InfeasibleError: nothing fits into memory.
        OptionsError: pins, stages, microbatches or a schedule that cannot be had.
    """
    _check_schedule(request)
    pinned, placed = stage_pins(request.options.pins)
    unstaged = replace(request, options=replace(request.options, pins=placed))
    found: list[Candidate] = []
    failure: InfeasibleError | None = None
    if _may_be_whole(request, pinned):
        found, failure = _without_stages(unstaged, timings)
    best = min((one.seconds for one in found), default=math.inf)
    staged, complaint = with_stages(unstaged, pinned, timings, best)
    found += staged
    if not found:
        raise failure or complaint()
    chosen = min(found, key=lambda one: one.seconds * _safety_factor(request, one))
    passed = _passed_over(found, chosen)
    if chosen.improved is not None:
        with timings.phase("schedule"):
            chosen = chosen.improved()
    with timings.phase("report"):
        plan, listed = replace(chosen.make(), pinned=dict(request.options.pins)), _also_priced(found, chosen)
        said = (*passed, *_quicker_baselines(plan, listed), *idle_devices(plan, listed))
        warnings = (*plan.warnings, *said, *_warnings_of_time(request, timings))
        return replace(plan, baselines=listed, warnings=warnings)


def _check_schedule(request: PlanRequest) -> None:
    options, devices = request.options, math.prod(request.mesh)
    if options.schedule is not None and (devices == 1 or options.stages == 1) and options.microbatches in (None, 1):
        why = f"stages={options.stages}" if options.stages is not None else f"the mesh {request.mesh} has one device"
        raise OptionsError(
            f"schedule={options.schedule!r} is the order of work in pipeline stages, but {why}: leave schedule out, "
            "or give a mesh of several devices and stages=2 or more (or None to search)"
        )


def _safety_factor(request: PlanRequest, one: Candidate) -> float:
    """What the seconds of a pipeline that nobody asked for count as, where processes share cores."""
    options = request.options
    is_requested = options.stages is not None or options.schedule is not None
    is_pipeline = one.layout is not None and one.layout.stages > 1
    return SHARED_CORES_SAFETY_FACTOR if is_pipeline and not is_requested and request.cluster.sharing > 1 else 1.0


def _passed_over(found: list[Candidate], chosen: Candidate) -> Iterator[str]:
    quickest = min(found, key=lambda one: one.seconds)
    if quickest.seconds < chosen.seconds and quickest.layout is not None:
        yield (
            f"{quickest.layout.stages} stages are predicted at {quickest.seconds / chosen.seconds:.0%} of this, but "
            f"on shared cores, pipelines ran up to {SHARED_CORES_SAFETY_FACTOR - 1:.0%} slower than predicted relative "
            f"to single-stage plans; Options(stages={quickest.layout.stages}) chooses them"
        )


def _quicker_baselines(plan: Plan, listed: Mapping[str, Predicted | None]) -> Iterator[str]:
    """FSDP2 can do one thing that plans cannot, see :mod:`autopar.placement.baselines`: where that decides, the plan
    says so."""
    other, seconds = listed.get("FSDP"), plan.predicted.step_seconds
    # Chosen: as Options.gap.
    if other is not None and other.peak_bytes <= plan.memory_limit and other.step_seconds < 0.99 * seconds:
        yield (
            f"FSDP2 is priced at {other.step_seconds / seconds:.0%} of this: it gathers the weights of a block in one "
            "all-gather, where a plan gathers tensor by tensor"
        )


def _warnings_of_time(request: PlanRequest, timings: Timings) -> Iterator[str]:
    limit = request.options.time_limit
    if timings.is_spent(limit):
        yield f"solving took all of time_limit={limit:g} s: other pipelines or placements may be better"


def _also_priced(found: list[Candidate], best: Candidate) -> dict[str, Predicted | None]:
    """What else was priced, by name: the baselines on the best mesh without stages, and the quickest of every other
    way to divide the devices."""
    quickest: dict[StageLayout | None, Candidate] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        quickest.setdefault(one.layout, one)
    listed = {name: priced for one in quickest.values() for name, priced in one.baselines.items()}
    listed.update(one.figures() for one in quickest.values() if one.layout != best.layout)
    return listed


def _may_be_whole(request: PlanRequest, pinned: Mapping[str, str]) -> bool:
    options = request.options
    return options.stages in (None, 1) and options.microbatches in (None, 1) and not pinned and not options.schedule


def _without_stages(request: PlanRequest, timings: Timings) -> tuple[list[Candidate], InfeasibleError | None]:
    """The best plan on every candidate mesh, or why there is none."""
    graph = step_graph(request.graph, request.loss, request.batch)
    found: list[Candidate] = []
    failure: InfeasibleError | None = None
    for mesh in mesh_candidates(request):
        on_mesh = replace(request, mesh=mesh)
        try:
            solved, priced = solve_mesh(on_mesh, graph, timings)
        except InfeasibleError as error:
            failure = failure or error
            continue
        make = partial(make_plan, on_mesh, graph, solved, priced, timings)
        figures = partial(_whole_figures, on_mesh, solved)
        found.append(Candidate(solved.breakdown.seconds, None, make, figures, priced))
    return found, failure


def _whole_figures(request: PlanRequest, solved: MeshSolution) -> tuple[str, Predicted]:
    figures = predicted(solved.breakdown, solved.instance, request.cluster)
    return f"no stages, {named_axes(request, solved.assignment, solved.instance.graph)}", figures
