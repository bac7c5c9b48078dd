"""Finds the best plan, with or without stages, over all candidate layouts of the devices.

Plans without stages are searched first; pipelines are then tried where they could win (:mod:`.attempts`).
``Options(stages=..., microbatches=..., schedule=...)`` fixes any of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.plan_record import Predicted
from autopar.ir.searched import Searched
from autopar.layout import Layout
from autopar.placement.constraints import by_first_names
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.request import PlanRequest, Proposals, memory_limit_of
from autopar.planner.step_graphs import pipelined_step_of
from autopar.planner.timings import Timings
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
    Candidate,
    Failure,
    Staged,
    Tried,
    also_priced,
    keep_shown,
    needed,
    tried_divisions,
    why_excluded,
)
from .division_bounds import bounds_of, searched
from .pipeline_request import MOST_CHUNKS
from .pipelines import with_stages
from .proposed import tried_proposals
from .segments import stage_pins
from .without_stages import least_without_stages, plans_without_stages, why_too_large

# Pipelines whose processes share cores took up to this many times their predicted seconds, relative to the plan of one
# stage (benchmarks/results/two_hosts.json, pipeline_plans.json).
SHARED_CORES_SAFETY_FACTOR = 1.1
# How many times as long as the quickest placements without stages, which do not fit, pipelines take at most that are
# tried before placements are sought that do. Chosen: what a limit costs that is worth stages.
AHEAD = 1.15
# The share of counted work that is left for plans without stages then. Chosen, as for what comes after them.
FOR_NO_STAGES = 0.75


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
    tried = _tried(unstaged, pinned, timings)
    if not tried.candidates:
        raise _refusal(unstaged, pinned, tried.failures, timings)
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

    least = partial(least_without_stages, request, timings)
    tried = tried_proposals(request, propose, timings, solve, partial(_worth, request), least)
    return replace(tried if tried.candidates else solve(request), estimated=estimated)


def _worth(request: PlanRequest, tried: Tried) -> float:
    """Seconds of a plan without stages that would not be chosen instead of what was tried; infinite if nothing was."""
    seconds = (candidate.seconds * _safety_factor(request, candidate) for candidate in tried.candidates)
    return min(seconds, default=math.inf)


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


def _refusal(
    request: PlanRequest, pinned: Mapping[str, str], failures: Sequence[Failure], timings: Timings
) -> Exception:
    """The error to show where nothing was found: what would fit, if that is wanted."""
    main = _main(failures)
    if not isinstance(main.error, InfeasibleError) or not timings.advises:
        return main.error
    if request.options.layout is None:
        return main.error.explained if main.explain is None else main.explain()
    advice = timings.advising(request.options, len(request.graph), math.prod(request.mesh))
    error = main.error.explained if main.explain is None else main.error
    return layout_infeasible(request, error, main.explain, partial(_quickest, pinned), advice)


def _main(failures: Sequence[Failure]) -> Failure:
    """Which failure to show: of what does not fit, that which needs fewest bytes; where this is not known yet, the
    first pipeline."""
    known = [failure for failure in failures if failure.explain is None]
    alone = [(needed(each.error), i) for i, each in enumerate(known) if isinstance(each.error, InfeasibleError)]
    if alone:
        return known[min(alone)[1]]
    return next((failure for failure in failures if failure.explain is not None), failures[0])


def _quickest(pinned: Mapping[str, str], request: PlanRequest) -> Plan:
    """The quickest plan for ``request``; the work is counted, as for all advice in errors. Raises
    :class:`InfeasibleError` or :class:`OptionsError`."""
    check_stages_divide(request)
    tried = _of_arrangements(arrangements(request), pinned, Timings(counted=True))
    if not tried.candidates:
        raise InfeasibleError("nothing fits")
    # Made, since only then it has been rehearsed: figures are counted, of fewer bytes.
    return min(tried.candidates, key=lambda candidate: candidate.seconds).make()


def _of_arrangement(request: PlanRequest, pinned: Mapping[str, str], timings: Timings, best: float) -> Tried:
    """What one arrangement has; ``best``: seconds of the quickest plan of others. Raises :class:`OptionsError` if the
    options are impossible."""
    tried, ahead = Tried(), Staged()
    if _may_lack_stages(request, pinned):
        ahead = _ahead(request, pinned, timings, best)
        worth = min(request.worth, _worth(request, ahead.tried))
        tried = plans_without_stages(replace(request, worth=worth), timings)
    if tried.failures and never_fits(request):
        return tried
    # What was found without stages tells whether memory is short: plans that save it may cost next to nothing.
    lacks_memory = _wants_memory(tried) or (bool(ahead.settled) and not tried.candidates)
    least = min(best, tried.least, ahead.least)
    staged = with_stages(request, pinned, timings, least, lacks_memory, ahead)
    tried += staged.tried
    if tried.candidates:
        return replace(tried, failures=())
    return tried if tried.failures or staged.failure is None else replace(tried, failures=(staged.failure,))


def _ahead(request: PlanRequest, pinned: Mapping[str, str], timings: Timings, best: float) -> Staged:
    """The pipelines that come first: where the quickest placements without stages do not fit, those that could take
    about as long. They are soon found, and spare much of the search for placements that save memory, whose programs are
    the hardest. Not where some that save enough are known, and are as quick: then these spare it."""
    options = request.options
    is_open = options.stages is None and options.microbatches is None and math.prod(request.mesh) > 1
    short = why_too_large(request, timings) if is_open and not never_fits(request) else None
    if short is None:
        return Staged()
    with timings.phase("price"):
        with_savers = short.with_savers()
    if with_savers <= AHEAD * short.seconds:
        return Staged()
    found = with_stages(request, pinned, timings, min(best, AHEAD * short.seconds), lacks_memory=True, is_ahead=True)
    timings.reserve(options, FOR_NO_STAGES)
    return found


def _check_schedule(request: PlanRequest) -> None:
    options, devices = request.options, math.prod(request.mesh)
    if asks_for_chunks(request) and options.stages == 1:
        raise OptionsError(
            f"{words_of(options.layout)}: chunks of layers take turns on pipeline stages, but stages=1; leave "
            "interleave out, or ask for 2 stages or more"
        )
    if options.schedule is not None and (devices == 1 or options.stages == 1) and options.microbatches in (None, 1):
        of_layout = options.layout is not None and "pipeline" in options.layout.given
        name = "pipeline" if of_layout else "stages"
        why = f"{name}={options.stages}" if options.stages is not None else f"the mesh {request.mesh} has one device"
        mesh = "" if devices > 1 else "give a mesh of several devices and "
        searched = "" if of_layout else " (or None to search)"
        raise OptionsError(
            f"schedule={options.schedule!r} orders the work of pipeline stages, but {why}: leave schedule out, "
            f"or {mesh or 'take '}{name}=2 or more{searched}"
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
