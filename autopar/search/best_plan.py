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
from autopar.planner.mesh_solution import Answer
from autopar.planner.request import Question, mesh_candidates
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan
from autopar.plans.plan import Plan
from autopar.plans.views.idle_axes import idle_devices

from .candidate import Found, named_axes
from .pipelines import with_stages
from .segments import stage_pins
from .stage_meshes import StageMeshes

# Pipelines of processes that share cores took up to this many times their price, relative to plans without stages
# (benchmarks/results/two_hosts.json, pipeline_plans.json).
SHARED_CORES_DOUBT = 1.2


def answer(question: Question, timings: Timings) -> Plan:
    """The best plan for ``question``.

    Raises:
        InfeasibleError: nothing fits into memory.
        OptionsError: pins, stages, microbatches or a schedule that cannot be had.
    """
    _check_schedule(question)
    pinned, placed = stage_pins(question.options.pins)
    asked = replace(question, options=replace(question.options, pins=placed))
    found: list[Found] = []
    failure: InfeasibleError | None = None
    if _may_be_whole(question, pinned):
        found, failure = _without_stages(asked, timings)
    best = min((one.seconds for one in found), default=math.inf)
    staged, complaint = with_stages(asked, pinned, timings, best)
    found += staged
    if not found:
        raise failure or complaint()
    chosen = min(found, key=lambda one: one.seconds * _doubt(question, one))
    passed = _passed_over(found, chosen)
    if chosen.improved is not None:
        with timings.phase("schedule"):
            chosen = chosen.improved()
    with timings.phase("report"):
        plan, listed = replace(chosen.make(), pinned=dict(question.options.pins)), _also_priced(found, chosen)
        said = (*passed, *_quicker_baselines(plan, listed), *idle_devices(plan, listed))
        warnings = (*plan.warnings, *said, *_warnings_of_time(question, timings))
        return replace(plan, baselines=listed, warnings=warnings)


def _check_schedule(question: Question) -> None:
    options, devices = question.options, math.prod(question.mesh)
    if options.schedule is not None and (devices == 1 or options.stages == 1) and options.microbatches in (None, 1):
        why = f"stages={options.stages}" if options.stages is not None else f"the mesh {question.mesh} has one device"
        raise OptionsError(
            f"schedule={options.schedule!r} is the order of work in pipeline stages, but {why}: leave schedule out, "
            "or give a mesh of several devices and stages=2 or more (or None to search)"
        )


def _doubt(question: Question, one: Found) -> float:
    """What the seconds of a pipeline that nobody asked for count as, where processes share cores."""
    options = question.options
    asked = options.stages is not None or options.schedule is not None
    is_pipeline = one.layout is not None and one.layout.stages > 1
    return SHARED_CORES_DOUBT if is_pipeline and not asked and question.cluster.sharing > 1 else 1.0


def _passed_over(found: list[Found], chosen: Found) -> Iterator[str]:
    quickest = min(found, key=lambda one: one.seconds)
    if quickest.seconds < chosen.seconds and quickest.layout is not None:
        yield (
            f"{quickest.layout.stages} stages are priced at {quickest.seconds / chosen.seconds:.0%} of this, but where "
            f"processes share cores stages took up to {SHARED_CORES_DOUBT - 1:.0%} more than their price, beside plans "
            f"without; Options(stages={quickest.layout.stages}) takes them"
        )


def _quicker_baselines(plan: Plan, listed: Mapping[str, Predicted | None]) -> Iterator[str]:
    """FSDP2 can do one thing that plans cannot, see :mod:`autopar.placement.baselines`: where that decides, the plan
    says so."""
    other, seconds = listed.get("FSDP"), plan.predicted.step_seconds
    if other is not None and other.peak_bytes <= plan.memory_limit and other.step_seconds < 0.99 * seconds:
        yield (
            f"FSDP2 is priced at {other.step_seconds / seconds:.0%} of this: it gathers the weights of a block in one "
            "all-gather, where a plan gathers tensor by tensor"
        )


def _warnings_of_time(question: Question, timings: Timings) -> Iterator[str]:
    limit = question.options.time_limit
    if timings.is_spent(limit):
        yield f"solving took all of time_limit={limit:g} s: other pipelines or placements may be better"


def _also_priced(found: list[Found], best: Found) -> dict[str, Predicted | None]:
    """What else was priced, by name: the baselines on the best mesh without stages, and the quickest of every other
    way to divide the devices."""
    quickest: dict[StageMeshes | None, Found] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        quickest.setdefault(one.layout, one)
    listed = {name: priced for one in quickest.values() for name, priced in one.baselines.items()}
    listed.update(one.figures() for one in quickest.values() if one.layout != best.layout)
    return listed


def _may_be_whole(question: Question, pinned: Mapping[str, str]) -> bool:
    options = question.options
    return options.stages in (None, 1) and options.microbatches in (None, 1) and not pinned and not options.schedule


def _without_stages(question: Question, timings: Timings) -> tuple[list[Found], InfeasibleError | None]:
    """The best plan on every candidate mesh, or why there is none."""
    graph = step_graph(question.graph, question.loss, question.batch)
    found: list[Found] = []
    failure: InfeasibleError | None = None
    for mesh in mesh_candidates(question):
        asked = replace(question, mesh=mesh)
        try:
            solved, priced = solve_mesh(asked, graph, timings)
        except InfeasibleError as error:
            failure = failure or error
            continue
        make = partial(make_plan, asked, graph, solved, priced, timings)
        figures = partial(_whole_figures, asked, solved)
        found.append(Found(solved.account.seconds, None, make, figures, priced))
    return found, failure


def _whole_figures(question: Question, solved: Answer) -> tuple[str, Predicted]:
    figures = predicted(solved.account, solved.instance, question.cluster)
    return f"no stages, {named_axes(question, solved.assignment, solved.instance.graph)}", figures
