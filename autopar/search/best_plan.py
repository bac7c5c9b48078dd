"""Finds the best plan, with or without stages, over all candidate layouts of the devices.

Plans without stages are searched first; pipelines are then tried where they could win (:mod:`.attempts`).
``Options(stages=..., microbatches=..., schedule=...)`` fixes any of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.plan_record import Predicted
from autopar.ir.searched import Searched
from autopar.layout import Layout
from autopar.options import without_stages
from autopar.placement.predicted import predicted
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import PlanRequest
from autopar.planner.row_shares import divisions, on_mesh
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan
from autopar.plans.plan import Plan
from autopar.plans.views.idle_axes import idle_devices
from autopar.restriction import words_of
from autopar.search.restricted.advice import layout_infeasible
from autopar.search.restricted.arrangements import arrangements

from .attempts import asks_for_chunks, keeps_axes, proposes
from .best_batch import best_batch
from .candidate import Candidate, named_axes
from .division_bounds import Division, bounds_of, covered, searched
from .pipeline import MOST_CHUNKS
from .pipelines import whole_step, with_stages
from .segments import stage_pins
from .stage_meshes import StageLayout

# An error, or what makes one: that of a pipeline takes a search for what would be possible.
Failure = Exception | Callable[[], Exception]

# Pipelines whose processes share cores took up to this many times their predicted seconds, relative to plans without
# stages (benchmarks/results/two_hosts.json, pipeline_plans.json).
SHARED_CORES_SAFETY_FACTOR = 1.2


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
    pinned, placement_pins = stage_pins(request.options.pins)
    unstaged = replace(request, options=replace(request.options, pins=placement_pins))
    if pinned:
        _check_stages_are_searched(unstaged)
    try:
        candidates = _candidates(unstaged, pinned, timings)
    except InfeasibleError as error:
        explained = layout_infeasible(unstaged, error, partial(_predicted, pinned))
        if explained is error:  # Not raised from itself: who follows causes would never come to an end.
            raise
        raise explained from error
    chosen = min(candidates, key=lambda candidate: candidate.seconds * _safety_factor(request, candidate))
    rejected = _rejected(candidates, chosen)
    if chosen.improved is not None:
        with timings.phase("schedule"):
            chosen = chosen.improved()
    with timings.phase("report"):
        plan, listed = chosen.make(), _also_priced(candidates, chosen)
        layout = request.options.layout
        restriction = "" if layout is None else layout.restriction
        plan = replace(plan, pinned=dict(request.options.pins), layout=restriction)
        notes = (*rejected, *_quicker_baselines(plan, listed), *idle_devices(plan, listed))
        warnings = (*plan.warnings, *notes, *_warnings_of_time(request, timings))
        covered_by = _searched(unstaged, candidates, plan.predicted.step_seconds)
        return replace(plan, baselines=listed, warnings=warnings, searched=covered_by)


def _searched(request: PlanRequest, candidates: Sequence[Candidate], seconds: float) -> Searched | None:
    """What the search for a plan of ``seconds`` covered, where it solved a few of many divisions."""
    if not proposes(request):
        return None
    solved = {division: bound for candidate in candidates for division, bound in candidate.divisions.items()}
    return searched(bounds_of(request, whole_step(request)), request.batch, MOST_CHUNKS, solved, seconds)


def _check_stages_are_searched(request: PlanRequest) -> None:
    """Raises :class:`OptionsError` if pins name stages, and nothing would be tried that has any."""
    if math.prod(request.mesh) == 1:
        raise OptionsError(f"pins name stages, but the mesh {request.mesh} has one device: leave them out")
    if request.options.stages is None and keeps_axes(request):
        raise OptionsError(
            "pins name stages, but zero, pins of placements, named axes or mesh_search=False refer to the axes "
            "of the mesh, of which stages would take some: say how many stages there are, Options(stages=2)"
        )


def _candidates(request: PlanRequest, pinned: Mapping[str, str], timings: Timings) -> list[Candidate]:
    """The candidates that are compared. Where layouts are proposed, pipelines are restricted by these, and are not
    enumerated. Raises what :func:`_of_arrangements` raises."""
    with timings.phase("propose"):
        layouts = request.propose(request) if request.propose is not None and proposes(request) else ()
    if not layouts:
        return _of_arrangements(arrangements(request), pinned, timings)

    def solve(layout: Layout) -> list[Candidate]:
        restricted = replace(request, options=replace(request.options, layout=layout))
        with suppress(InfeasibleError, OptionsError):
            return _of_arrangements(arrangements(restricted), pinned, timings, explains=False)
        return []

    candidates = list[Candidate]()
    for layout in layouts:
        if candidates and timings.is_spent(request.options.time_limit):
            break
        found = solve(layout)
        better = _least(found) < _least(candidates)
        candidates += found
        if better:
            quickest = layout
    if candidates and not timings.is_spent(request.options.time_limit):
        candidates += _other_microbatches(request, quickest, _least(candidates), solve)
    own = request if not candidates else replace(request, options=without_stages(request.options))
    with suppress(*((InfeasibleError,) if candidates else ())):
        candidates += _of_arrangements(arrangements(own), pinned, timings)
    return candidates


def _other_microbatches(
    request: PlanRequest, layout: Layout, best: float, solve: Callable[[Layout], list[Candidate]]
) -> Iterator[Candidate]:
    """Candidates like those of ``layout``, which takes ``best`` seconds, with larger and smaller microbatches: as long
    as these are quicker, and their bound says that they could be."""
    for factor in (2.0, 0.5):
        seconds, size = best, layout.microbatch * factor
        while size.is_integer() and request.batch % (layout.data * size) == 0:
            count = request.batch // (layout.data * int(size))
            division = Division(layout.pipeline, layout.data, layout.tensor, count, 1)
            if bounds_of(request, whole_step(request)).seconds(division) >= seconds:
                break
            found = solve(replace(layout, microbatch=int(size)))
            yield from found
            if _least(found) >= seconds:
                break
            seconds, size = _least(found), size * factor


def _of_arrangements(
    arranged: Sequence[PlanRequest], pinned: Mapping[str, str], timings: Timings, explains: bool = True
) -> list[Candidate]:
    """The candidates of all arrangements. Where there are several, those that are impossible are left out. If there is
    no candidate at all, raises the error of the arrangement that needs least memory, else the first; ``explains``:
    whether it says what would be possible, which takes a search."""
    candidates: list[Candidate] = []
    failures: list[Failure] = []
    for request in arranged:
        try:
            found, make_error = _of_arrangement(request, pinned, timings, _least(candidates))
        except (InfeasibleError, OptionsError) as error:
            failures.append(error)
        else:
            candidates += found
            failures += [make_error] if make_error else []
        if timings.is_spent(request.options.time_limit) and candidates:
            break
    if not candidates:
        raise _main(failures) if explains else InfeasibleError("nothing fits")
    return candidates


def _main(failures: Sequence[Failure]) -> Exception:
    """Of what does not fit, what needs fewest bytes; where that is not known yet, the error of the first pipeline."""
    known = [failure for failure in failures if isinstance(failure, Exception)]
    infeasible = [error for error in known if isinstance(error, InfeasibleError)]
    if infeasible:
        return min(infeasible, key=lambda error: error.needed_bytes or math.inf)
    makers = [failure for failure in failures if not isinstance(failure, Exception)]
    return makers[0]() if makers else known[0]


def _predicted(pinned: Mapping[str, str], request: PlanRequest) -> Predicted:
    """Predicts the quickest plan for ``request``; the work is counted, as for all advice in errors. Raises
    :class:`InfeasibleError` or :class:`OptionsError`."""
    found = _of_arrangements(arrangements(request), pinned, Timings(counted=True), explains=False)
    return min(found, key=lambda candidate: candidate.seconds).figures()[1]


def _of_arrangement(
    request: PlanRequest, pinned: Mapping[str, str], timings: Timings, best: float
) -> tuple[list[Candidate], Failure | None]:
    """The candidates of one arrangement, or what makes the error that says why there is none; ``best``: seconds of the
    quickest of others. Raises :class:`OptionsError` if the options are impossible."""
    candidates: list[Candidate] = []
    failure: InfeasibleError | None = None
    if _may_lack_stages(request, pinned):
        candidates, failure = _without_stages(request, timings)
    staged, make_error = with_stages(request, pinned, timings, min(best, _least(candidates)))
    found = [*candidates, *staged]
    return found, None if found else (failure or make_error)


def _least(candidates: Sequence[Candidate]) -> float:
    return min((candidate.seconds for candidate in candidates), default=math.inf)


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


def _rejected(candidates: list[Candidate], chosen: Candidate) -> Iterator[str]:
    """A note on the candidate that is predicted to be quickest, if the safety factor ruled it out."""
    quickest = min(candidates, key=lambda candidate: candidate.seconds)
    if quickest.seconds < chosen.seconds and quickest.layout is not None:
        yield (
            f"{quickest.layout.described} are predicted at {quickest.seconds / chosen.seconds:.0%} of this, but "
            f"on shared cores, pipelines ran up to {SHARED_CORES_SAFETY_FACTOR - 1:.0%} slower than predicted relative "
            f"to single-stage plans; Options(stages={quickest.layout.counts or quickest.layout.stages}) chooses them"
        )


def _quicker_baselines(plan: Plan, listed: Mapping[str, Predicted | None]) -> Iterator[str]:
    """A note if FSDP2 is quicker than the plan. FSDP2 can do one thing that plans cannot, see
    :mod:`autopar.placement.baselines`."""
    fsdp, seconds = listed.get("FSDP"), plan.predicted.step_seconds
    # Chosen: as Options.gap.
    if fsdp is not None and fsdp.peak_bytes <= plan.least_limit and fsdp.step_seconds < 0.99 * seconds:
        yield (
            f"FSDP2 is priced at {fsdp.step_seconds / seconds:.0%} of this: it gathers the weights of a block in one "
            "all-gather, where a plan gathers tensor by tensor"
        )


def _warnings_of_time(request: PlanRequest, timings: Timings) -> Iterator[str]:
    limit = request.options.time_limit
    if timings.is_spent(limit):
        yield f"solving took all of time_limit={limit:g} s: other pipelines or placements may be better"


def _also_priced(candidates: list[Candidate], best: Candidate) -> dict[str, Predicted | None]:
    """The alternatives that were priced, by name: the baselines on the best mesh without stages, and the quickest
    candidate of every other layout of the devices."""
    quickest: dict[StageLayout | None, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.seconds):
        quickest.setdefault(candidate.layout, candidate)
    listed = {name: priced for candidate in quickest.values() for name, priced in candidate.baselines.items()}
    listed.update(candidate.figures() for candidate in quickest.values() if candidate.layout != best.layout)
    return listed


def _may_lack_stages(request: PlanRequest, pinned: Mapping[str, str]) -> bool:
    """Whether the options allow plans without stages and microbatches."""
    options = request.options
    asks_for_stages = bool(pinned or options.schedule) or asks_for_chunks(request)
    return options.stages in (None, 1) and options.microbatches in (None, 1) and not asks_for_stages


def _without_stages(request: PlanRequest, timings: Timings) -> tuple[list[Candidate], InfeasibleError | None]:
    """The best plan on every candidate mesh, or why there is none."""
    whole, loss, batch = request.graph, request.loss, request.batch
    graph = request.shared.once("step", (whole,), loss, batch, make=lambda: step_graph(whole, loss, batch))
    candidates: list[Candidate] = []
    failure: InfeasibleError | None = None
    for division in divisions(request, batch):
        inside = on_mesh(request, division)
        try:
            solved, priced = solve_mesh(inside, graph, timings)
        except InfeasibleError as error:
            failure = failure or error
            continue
        make = partial(make_plan, inside, graph, solved, priced, timings)
        figures = partial(_figures, inside, solved)
        roles = [role.name for role in inside.roles] or [""] * len(inside.mesh)
        # The program's own bound is of equal layers that choose alike, and of the restrictions.
        known = dict.fromkeys(covered(inside.mesh, roles, 1, 1, (1,)), 0.0)
        candidates.append(Candidate(solved.breakdown.seconds, None, make, figures, priced, divisions=known))
    return candidates, failure


def _figures(request: PlanRequest, solved: MeshSolution) -> tuple[str, Predicted]:
    figures = predicted(solved.breakdown, solved.instance, request.cluster)
    return f"no stages, {named_axes(request, solved.assignment, solved.instance.graph)}", figures
