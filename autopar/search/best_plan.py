"""Finds the best plan, with or without stages, over all candidate layouts of the devices.

Plans without stages are searched first; pipelines are then tried where they could win (:mod:`.attempts`).
``Options(stages=..., microbatches=..., schedule=...)`` fixes any of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.graph import Graph
from autopar.ir.plan_record import Predicted
from autopar.ir.searched import Searched
from autopar.layout import Layout
from autopar.options import without_stages
from autopar.placement.constraints import by_first_names
from autopar.placement.predicted import predicted
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import PlanRequest, Proposals, asked_mesh, memory_limit_of
from autopar.planner.row_shares import Division as RowDivision
from autopar.planner.row_shares import bisected, divisions, divisions_by_memory, on_mesh
from autopar.planner.solve_mesh import is_short_of_memory, least_seconds, priced_baselines, solve_mesh
from autopar.planner.step_graphs import pipelined_step_of, step_of
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan
from autopar.plans.plan import Plan
from autopar.plans.views.idle_axes import idle_devices
from autopar.restriction import words_of
from autopar.search.restricted.advice import layout_infeasible
from autopar.search.restricted.arrangements import arrangements
from autopar.search.restricted.divides import check_stages_divide
from autopar.search.restricted.nearest import arranged_or_explained
from autopar.search.restricted.never_fits import never_fits

from .attempts import asks_for_chunks, keeps_axes, proposes
from .best_batch import best_batch
from .candidate import (
    NO_STAGES,
    Candidate,
    Excluded,
    Failure,
    Tried,
    also_priced,
    keep_shown,
    named_axes,
    needed,
    tried_divisions,
    why_excluded,
)
from .division_bounds import Division, bounds_of, covered, searched
from .pipeline_request import MOST_CHUNKS
from .pipelines import with_stages
from .proposed import Least, tried_proposals
from .segments import stage_pins

# Pipelines whose processes share cores took up to this many times their predicted seconds, relative to the plan of one
# stage (benchmarks/results/two_hosts.json, pipeline_plans.json).
SHARED_CORES_SAFETY_FACTOR = 1.1


def best_plan(request: PlanRequest, timings: Timings) -> Plan:
    """The best plan for ``request``, for another batch if the objective is throughput (:mod:`.best_batch`).

    Raises:
        InfeasibleError: nothing fits into memory.
        OptionsError: the requested pins, stages, microbatches or schedule are impossible.
    """
    if request.options.objective == "throughput":
        return best_batch(request, lambda batch: _best_plan(batch, timings))
    return _best_plan(request, timings)


def _best_plan(request: PlanRequest, timings: Timings) -> Plan:
    _check_schedule(request)
    pinned, placement_pins = stage_pins(by_first_names(request.options.pins, dict(request.tied)))
    unstaged = replace(request, options=replace(request.options, pins=placement_pins))
    if pinned:
        _check_stages_are_searched(unstaged)
    try:
        tried = _tried(unstaged, pinned, timings)
        if not tried.candidates:
            raise _main(tried.failures, timings.advises)
    except InfeasibleError as error:
        if not timings.advises:
            raise
        advice = timings.advising(request.options, len(request.graph), math.prod(request.mesh))
        explained = layout_infeasible(unstaged, error, partial(_predicted, pinned), advice)
        if explained is error:  # Not raised from itself: who follows causes would never come to an end.
            raise
        raise explained from error
    chosen = min(tried.candidates, key=lambda candidate: candidate.seconds * _safety_factor(request, candidate))
    listed, rejected = partial(also_priced, tried, chosen), _rejected(tried.candidates, chosen)
    if chosen.improved is not None:
        with timings.phase("schedule"):
            chosen = chosen.improved()
    with timings.phase("report"):
        plan, baselines = chosen.make(), listed()
        layout = request.options.layout
        restriction = "" if layout is None else layout.restriction
        plan = replace(plan, pinned=dict(request.options.pins), layout=restriction)
        notes = (*rejected, *idle_devices(plan, baselines))
        return replace(
            plan,
            baselines=baselines,
            excluded=_why_impossible(request, baselines) | why_excluded(tried, memory_limit_of(unstaged)),
            warnings=(*plan.warnings, *notes, *_warnings_of_time(request, timings)),
            searched=_searched(unstaged, tried, plan.predicted.step_seconds),
        )


def _wants_memory(tried: Tried) -> bool:
    """Whether with more memory there might be a plan, or a quicker one."""
    failed = () if tried.candidates else tried.failures
    return tried.lacks_memory or any(not isinstance(each.error, TooSlowError) for each in failed)


def _why_impossible(request: PlanRequest, listed: Mapping[str, Predicted | None]) -> dict[str, str]:
    """Under which options baselines are not possible, of those that leave fewer placements; empty if there are none."""
    options = request.options
    named = [f"zero={options.zero}"] if options.zero is not None else []
    named += ["pins"] if options.pins else []
    why = f"no placements under {' and '.join(named)}"
    return {name: why for name, priced in listed.items() if priced is None} if named else {}


def _searched(request: PlanRequest, tried: Tried, seconds: float) -> Searched | None:
    """What the search for a plan of ``seconds`` covered, where it solved a few of many divisions."""
    if not proposes(request):
        return None
    solved = {division for candidate in tried.candidates for division in candidate.divisions}
    solved |= {division for excluded in tried.excluded for division in excluded.divisions}
    known = tried_divisions(tried, request.batch)
    return searched(bounds_of(request, pipelined_step_of(request)), request.batch, MOST_CHUNKS, solved, seconds, known)


def _check_stages_are_searched(request: PlanRequest) -> None:
    """Raises :class:`OptionsError` if pins name stages, and nothing would be tried that has any."""
    if math.prod(request.mesh) == 1:
        raise OptionsError(f"pins name stages, but the mesh {request.mesh} has one device: leave them out")
    if request.options.stages is None and keeps_axes(request):
        raise OptionsError(
            "pins name stages, but zero, pins of placements, named axes or mesh_search=False refer to the axes "
            "of the mesh, of which stages would take some: say how many stages there are, Options(stages=2)"
        )


def _tried(request: PlanRequest, pinned: Mapping[str, str], timings: Timings) -> Tried:
    """What is compared. Where layouts are proposed, pipelines are restricted by these, and are not enumerated. Raises
    :class:`OptionsError` if the options are impossible."""
    check_stages_divide(request)

    def solve(own: PlanRequest) -> Tried:
        return _of_arrangements(arranged_or_explained(own), pinned, timings)

    if request.propose is None or not proposes(request) or never_fits(request):
        return solve(request)
    make, estimated = request.propose, dict[Layout, float]()

    def propose(worth: float) -> Proposals:
        with timings.phase("propose"):
            proposals = make(replace(request, worth=worth))
        estimated.update(proposals.estimated)
        return proposals

    least = partial(_least_without_stages, request, timings)
    tried = tried_proposals(request, propose, timings, solve, partial(_worth, request), least)
    return replace(tried if tried.candidates else solve(request), estimated=estimated)


def _least_without_stages(request: PlanRequest, timings: Timings) -> Least:
    """What plans without stages take at least, unless it would take programs of several meshes to know. Solvers' work
    is not counted, since the search for such plans counts the same work."""
    own, used = replace(request, options=without_stages(request.options)), timings.solving
    graph = step_of(request)
    try:
        tried = divisions(own, request.batch)
        if len(tried) > 1:
            return Least()
        inside = on_mesh(own, tried[0])
        seconds, priced = least_seconds(inside, graph, timings)
    except (InfeasibleError, OptionsError):
        return Least()
    finally:
        timings.solving = used

    def excluded() -> Tried:
        return _excluded(inside, TooSlowError(f"plans on mesh {asked_mesh(inside)}", seconds), priced())

    return Least(seconds, excluded)


def _worth(request: PlanRequest, tried: Tried) -> float:
    """Seconds of a plan without stages that would not be chosen instead of what was tried."""
    return min(candidate.seconds * _safety_factor(request, candidate) for candidate in tried.candidates)


def _of_arrangements(arranged: Sequence[PlanRequest], pinned: Mapping[str, str], timings: Timings) -> Tried:
    """What all arrangements have, those that are impossible left out."""
    tried = Tried()
    for request in arranged:
        try:
            tried += _of_arrangement(request, pinned, timings, tried.least)
        except (InfeasibleError, OptionsError) as error:
            tried += Tried(failures=(Failure(error),))
        keep_shown(tried)
        if timings.is_spent(request.options) and tried.candidates:
            break
        if tried.failures and (timings.is_up(request.options) or never_fits(request)):
            break
    return tried


def _main(failures: Sequence[Failure], advises: bool) -> Exception:
    """The error to show: of what does not fit, that which needs fewest bytes; where this is not known yet, that of the
    first pipeline. ``advises``: whether it says what would fit."""
    infeasible = [failure.error for failure in failures if isinstance(failure.error, InfeasibleError)]
    if infeasible and not advises:
        return infeasible[0]
    known = [failure.error for failure in failures if failure.explain is None]
    alone = [error for error in known if isinstance(error, InfeasibleError)]
    if alone:
        return min(alone, key=needed).explained
    makers = [failure.explain for failure in failures if failure.explain is not None]
    return makers[0]() if makers else known[0]


def _predicted(pinned: Mapping[str, str], request: PlanRequest) -> Predicted:
    """Predicts the quickest plan for ``request``; the work is counted, as for all advice in errors. Raises
    :class:`InfeasibleError` or :class:`OptionsError`."""
    check_stages_divide(request)
    tried = _of_arrangements(arrangements(request), pinned, Timings(counted=True))
    if not tried.candidates:
        raise InfeasibleError("nothing fits")
    # Made, since only then it has been rehearsed: figures are counted, of fewer bytes.
    return min(tried.candidates, key=lambda candidate: candidate.seconds).make().predicted


def _of_arrangement(request: PlanRequest, pinned: Mapping[str, str], timings: Timings, best: float) -> Tried:
    """What one arrangement has; ``best``: seconds of the quickest plan of others. Raises :class:`OptionsError` if the
    options are impossible."""
    tried = _without_stages(request, timings) if _may_lack_stages(request, pinned) else Tried()
    if tried.failures and never_fits(request):
        return tried
    staged, failure = with_stages(request, pinned, timings, min(best, tried.least), _wants_memory(tried))
    tried += staged
    if tried.candidates:
        return replace(tried, failures=())
    return tried if tried.failures else replace(tried, failures=(failure,))


def _check_schedule(request: PlanRequest) -> None:
    options, devices = request.options, math.prod(request.mesh)
    if asks_for_chunks(request) and options.stages == 1:
        raise OptionsError(
            f"{words_of(options.layout)}: chunks of layers take turns on pipeline stages, but stages=1; leave "
            "interleave out, or ask for 2 stages or more"
        )
    if options.schedule is not None and (devices == 1 or options.stages == 1) and options.microbatches in (None, 1):
        why = f"stages={options.stages}" if options.stages is not None else f"the mesh {request.mesh} has one device"
        raise OptionsError(
            f"schedule={options.schedule!r} orders the work of pipeline stages, but {why}: leave schedule out, "
            "or give a mesh of several devices and stages=2 or more (or None to search)"
        )


def _safety_factor(request: PlanRequest, candidate: Candidate) -> float:
    """The factor by which the seconds of a candidate are multiplied in comparisons. It is above 1 for pipelines that
    the user did not request, if processes share cores."""
    options = request.options
    is_requested = options.stages is not None or options.schedule is not None
    is_pipeline = candidate.layout is not None and candidate.layout.stages > 1
    return SHARED_CORES_SAFETY_FACTOR if is_pipeline and not is_requested and request.cluster.sharing > 1 else 1.0


def _rejected(candidates: Sequence[Candidate], chosen: Candidate) -> Iterator[str]:
    """A note on the candidate that is predicted to be quickest, if the safety factor ruled it out."""
    quickest = min(candidates, key=lambda candidate: candidate.seconds)
    if quickest.seconds < chosen.seconds and quickest.layout is not None:
        yield (
            f"{quickest.layout.described} are predicted at {quickest.seconds / chosen.seconds:.0%} of this, but "
            f"on shared cores, pipelines ran up to {SHARED_CORES_SAFETY_FACTOR - 1:.0%} slower than predicted relative "
            f"to single-stage plans; Options(stages={quickest.layout.counts or quickest.layout.stages}) chooses them"
        )


def _warnings_of_time(request: PlanRequest, timings: Timings) -> Iterator[str]:
    options = request.options
    if timings.is_spent(options) and options.time_limit is not None:
        yield f"solving took all of time_limit={options.time_limit:g} s: other pipelines or placements may be better"
    elif timings.is_spent(options):
        yield (
            f"solving took all the work that is counted by default, about {options.solver_seconds:g} s: other "
            "pipelines or placements may be better, which a larger Options(time_limit=...) would search"
        )


def _may_lack_stages(request: PlanRequest, pinned: Mapping[str, str]) -> bool:
    """Whether the options allow plans without stages and microbatches."""
    options = request.options
    asks_for_stages = bool(pinned or options.schedule) or asks_for_chunks(request)
    return options.stages in (None, 1) and options.microbatches in (None, 1) and not asks_for_stages


def _without_stages(request: PlanRequest, timings: Timings) -> Tried:
    """The best plan on every candidate mesh, and why there is none on the others."""
    graph, batch = step_of(request), request.batch
    tried = divisions(request, batch)
    found, rest = _divided(request, graph, tried, timings)
    if request.cluster.groups and _lacks_memory(request, found, rest.failures):
        for ordered in divisions_by_memory(request, batch, tried):
            found += bisected(ordered, partial(_in_division, request, graph, timings), lambda own: own.saves_memory)
    candidates = Tried(tuple(own.candidate() for own in found))
    return replace(candidates + rest, failures=rest.failures[:1])


def _lacks_memory(request: PlanRequest, found: Sequence[_Whole], failures: Sequence[Failure]) -> bool:
    """Whether more memory would make the quickest of what was ``found`` quicker or, if nothing was, possible."""
    if not found:
        return any(not isinstance(failure.error, TooSlowError) for failure in failures)
    return is_short_of_memory(request, min(found, key=lambda own: own.seconds).solution)


@dataclass(frozen=True)
class _Whole:
    """The solution of a step without stages; ``inside``: the request for its division of the rows."""

    inside: PlanRequest
    graph: Graph
    solution: MeshSolution
    baselines: dict[str, Predicted | None]
    timings: Timings

    @property
    def seconds(self) -> float:
        return self.solution.breakdown.seconds

    @property
    def saves_memory(self) -> bool:
        return self.solution.saves_memory

    def candidate(self) -> Candidate:
        inside, solved = self.inside, self.solution
        make = partial(make_plan, inside, self.graph, solved, self.baselines, self.timings)
        figures, known = partial(_figures, inside, solved), covered(inside, 1, 1, (1,))
        lacks = is_short_of_memory(inside, solved)
        return Candidate(self.seconds, None, make, figures, self.baselines, divisions=known, lacks_memory=lacks)


def _in_division(request: PlanRequest, graph: Graph, timings: Timings, division: RowDivision) -> _Whole | None:
    """The best solution in one division of the rows; None: nothing fits. Raises :class:`TooSlowError`."""
    found, rest = _divided(request, graph, [division], timings)
    for failure in rest.failures:
        if isinstance(failure.error, TooSlowError):
            raise failure.error
    return found[0] if found else None


def _divided(
    request: PlanRequest, graph: Graph, tried: Sequence[RowDivision], timings: Timings
) -> tuple[list[_Whole], Tried]:
    """The best solution in each of some divisions of the rows, and why others have none."""
    found, rest, failures = list[_Whole](), Tried(), list[Failure]()
    for division in tried:
        inside = on_mesh(request, division)
        try:
            found.append(_Whole(inside, graph, *solve_mesh(inside, graph, timings), timings))
        except InfeasibleError as error:
            failures.append(Failure(error))
            rest += _excluded(inside, error, priced_baselines(inside, graph, timings))
    return found, replace(rest, failures=tuple(failures))


def _excluded(inside: PlanRequest, error: InfeasibleError, priced: Mapping[str, Predicted | None]) -> Tried:
    """Excludes plans without stages in a division of the rows, whose baselines are ``priced``."""
    is_proven = isinstance(error, TooSlowError) and error.is_proven
    proven = covered(inside, 1, 1, (1,)) if is_proven else frozenset[Division]()
    return Tried(excluded=(Excluded(NO_STAGES, error, priced, proven),))


def _figures(request: PlanRequest, solved: MeshSolution) -> tuple[str, Predicted]:
    # Listed beside other plans, whose peaks are compared with what the smallest device may hold.
    smallest = min(solved.step.rooms, key=lambda held: held.room.limit, default=None)
    memory = None if smallest is None else smallest.memory
    figures = predicted(solved.breakdown, solved.instance, request.cluster, memory)
    return f"no stages, {named_axes(request, solved.assignment, solved.instance.graph)}", figures
