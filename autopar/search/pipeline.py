"""The quickest pipeline for one division of the devices into stages and of the batch into microbatches.

The placement program is solved once, for the graph of one microbatch on the mesh inside a stage, or once for each kind
of stage where they have unequal meshes. Its solution prices every node. From these prices come the cuts (:mod:`.cuts`)
and, for each schedule, the simulated step (:mod:`.pipeline_breakdown`). The quickest step wins.

The memory of the uncut graph is taken as that of all stages together. If a stage turns out too full, the program is
solved again with less memory, a few times.

Where devices are of several kinds (:mod:`.stage_devices`), each stage is priced and limited by its own, and the order
in which stages lie on them is tried like a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.passes.pipeline.cut_candidates import CutCandidate, cut_candidates
from autopar.passes.pipeline.microbatch import Microbatched, microbatch
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.planner.infeasible import check_host
from autopar.planner.memory_limit import ShortOfMemoryError, TooSlowError
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.steps.exact_memory import is_rehearsed
from autopar.solver.problem import memory_of

from .fitting_schedules import PipelineSolution, fits, kinds_within, schedules_of
from .pipeline_request import PipelineRequest
from .segments import PinnedTogetherError, pinned_ranks, segment_of_nodes
from .stage_meshes import StageLayout

# How often the program is solved: as if stages held the average, then as if all held what the fullest does, then with
# less and less memory. Chosen: each round costs a solve.
ROUNDS = 4
# How many schedules that fit into memory are priced exactly, in the order of their estimates.
# Chosen: an exact price takes longer than an estimate, and the second best estimate may be the better schedule.
PRICED = 2
# How many times as long as the best plan a pipeline takes of which no second schedule is priced: it is only listed. If
# its placements are expected to with what memory costs, none are sought.
# Chosen: exact prices are nearer to estimates than that.
CAN_WIN_WITHIN = 1.15
# As above, of the quickest placements, which do not fit: what does only takes longer.
# Chosen: of Llama 3 8B on 64 devices in two stages, what fits takes 1.003 times the estimate of what does not.
UNLIMITED_CAN_WIN_WITHIN = 1.05
# A schedule that does not fit is worth another solve, with less memory, if it is estimated to take at most this share
# of the seconds of the best that fits. Chosen: GPT-3 in 16 stages fitted under 1F1B alone, and took 0.84 under ZB-V so.
MISSED = 0.9


def search(request: PipelineRequest) -> PipelineSolution:
    """The quickest pipeline for one layout and number of microbatches.

    Raises:
        InfeasibleError: no division into stages fits into the memory of the devices or of their hosts.
            :class:`TooSlowError`: such a pipeline is expected to take longer than the best plan.
        OptionsError: the batch does not divide, the model has too few places to cut, or a pin cannot be met.
    """
    pieces = _pieces(request)
    saving = request.shared.once("saving", (pieces,), make=lambda: SaveActivations()(pieces.graph))
    candidates, segment_of = _candidates(request, pieces.graph)
    kinds_within(request, len(candidates) + 1)
    stages, worst = request.layout.stages, _Overfull()
    sizes = request.layout.sizes
    limit = sum(own * size for own, size in zip(request.limits, sizes, strict=True))
    host = request.host_limit * sum(sizes)
    average, fullest = (inner_repeats(request.microbatches, stages, fullest=of_one) for of_one in (False, True))
    best: PipelineSolution | None = None
    is_last = False
    too_large = request.too_large(saving, average, limit, host) if stages > 1 and math.isfinite(request.best) else None
    slowest = math.inf if too_large is None else _slowest(request, pieces, candidates, segment_of, too_large)
    for repeats in (average, *[fullest] * (ROUNDS - 1)):
        try:
            solved = request.solve(saving, repeats, limit, host, slowest)
        except ShortOfMemoryError:
            continue  # As below.
        except InfeasibleError:
            if best is None:
                raise
            return best
        # How much is too much matters in the last rounds alone.
        # What a whole step holds is measured: what is counted rules out nothing.
        asked = _without_limits(request) if stages == 1 and is_rehearsed(solved[0].instance) else request
        tried = schedules_of(asked, pieces, candidates, segment_of, solved, nearest=repeats == fullest)
        solutions, fitting = list[PipelineSolution](), list[PipelineSolution]()
        for solution in tried.solutions():
            solutions.append(solution)
            fitting += [solution] if fits(request, solution) else []
            if len(fitting) == PRICED or (fitting and fitting[0].seconds > CAN_WIN_WITHIN * request.best):
                break
        if best is not None or fitting:
            best = min([*filter(None, [best]), *fitting], key=lambda solution: solution.seconds)
            # Schedules that would be quicker do not fit, and may with placements that take less memory.
            share = None if is_last else tried.fullness_of_quicker(MISSED * best.seconds)
            if share is not None:
                limit, is_last = 0.95 * min(limit, _held(request, solved)) / share, True
                continue
            if repeats == average != fullest and tried.is_any_quicker(MISSED * best.seconds):
                continue  # What is quicker has more in flight than the average.
            return best
        host_bytes = min((solution.breakdown.host_bytes for solution in solutions), default=0)
        if host_bytes > request.host_limit:
            # 5% less than what would just fit: chosen, so that few rounds are needed.
            host *= 0.95 * request.host_limit / host_bytes
            continue
        worst = min([worst, *(_Overfull.of(request, solution) for solution in solutions)])
        if repeats != fullest:
            continue  # Memory binds: the first stage, which has most in flight, decides.
        # As above, and less than this solution has, lest it be found again; a fifth less where nothing could be cut.
        limit = min(limit, _held(request, solved))
        limit *= 0.95 * min(1.0, 1.0 / worst.share) if math.isfinite(worst.share) else 0.8
    if best is not None:
        return best
    check_host(solved[0].prices.cluster, host_bytes, request.host_limit)
    raise _too_full(request, worst)


def _slowest(
    request: PipelineRequest,
    pieces: Microbatched,
    candidates: tuple[CutCandidate, ...],
    segment_of: dict[str, int],
    quickest: tuple[MeshSolution, ...],
) -> float:
    """Seconds of a program within the limits with which a pipeline would not win: it is expected to take longer than
    that of the ``quickest`` placements, which do not fit, as its program does. Raises :class:`TooSlowError` if not even
    that would win."""
    free = _without_limits(request)

    def make() -> float:
        return schedules_of(free, pieces, candidates, segment_of, quickest, nearest=False).least_seconds

    of = pieces, request.cluster, *(own.instance.choices for own in quickest)
    chosen = tuple(own.solution.choices.tobytes() for own in quickest)
    settings = request.layout, request.schedule, request.chunks, tuple(request.pins.items()), chosen
    seconds = request.shared.once("quickest pipeline", of, *settings, make=make)
    if seconds > UNLIMITED_CAN_WIN_WITHIN * request.best:
        raise TooSlowError(_where(request.layout), seconds, is_proven=False, is_least=True)
    return CAN_WIN_WITHIN * request.best / seconds * max(own.solution.objective for own in quickest)


def _without_limits(request: PipelineRequest) -> PipelineRequest:
    return replace(request, limits=(math.inf,) * request.layout.stages, host_limit=math.inf)


@dataclass(frozen=True, order=True)
class _Overfull:
    """The rank that exceeds its limit most: ``bytes`` for each of its devices are ``share`` of the ``limit``."""

    share: float = math.inf
    bytes: int = 0
    limit: float = math.inf

    @staticmethod
    def of(request: PipelineRequest, solution: PipelineSolution) -> _Overfull:
        ranks = zip(solution.peaks, request.limits, strict=True)
        return max(_Overfull(peak / limit if limit > 0 else math.inf, peak, limit) for peak, limit in ranks)


def _held(request: PipelineRequest, solved: tuple[MeshSolution, ...]) -> float:
    """The bytes that a solution takes by its program, on all devices together; infinite where stages are unequal."""
    if request.layout.is_unequal:
        return math.inf
    own = solved[0]
    return memory_of(own.instance.problem, own.solution.choices) * request.layout.sizes[0]


def _pieces(request: PipelineRequest) -> Microbatched:
    """The graph of a microbatch. Raises :class:`OptionsError` if the batch does not divide."""
    graph, count, inputs = request.graph, request.microbatches, request.inputs
    settings = count, tuple(inputs.items()), request.alone is None
    return request.shared.once(
        "microbatch", (graph,), *settings, make=lambda: microbatch(graph, count, inputs, request.alone)
    )


def _candidates(request: PipelineRequest, graph: Graph) -> tuple[tuple[CutCandidate, ...], dict[str, int]]:
    """Where the graph may be cut, and the segment of each node. Takes the best places, and as many more as are needed
    to separate modules that pins put on different stages. Raises :class:`OptionsError` if none separate them."""
    least = _least_cuts(request)
    while True:
        cuts = cut_candidates if request.layout.stages > 1 else _no_cuts
        candidates, segment_of = request.shared.once(
            "segments", (graph,), cuts, least, make=partial(_segments, graph, cuts, least)
        )
        try:
            pinned_ranks(graph, segment_of, len(candidates) + 1, request.pins, request.layout.stages)
        except PinnedTogetherError:
            if len(candidates) < least:
                raise
            least = len(candidates) + 1
        else:
            return candidates, segment_of


def _no_cuts(graph: Graph, least: int) -> tuple[CutCandidate, ...]:
    return ()


def _segments(
    graph: Graph, cuts: Callable[[Graph, int], tuple[CutCandidate, ...]], least: int
) -> tuple[tuple[CutCandidate, ...], dict[str, int]]:
    candidates = cuts(graph, least)
    return candidates, segment_of_nodes(graph, candidates)


def _least_cuts(request: PipelineRequest) -> int:
    """How many cuts are needed at least: those of the requested schedule, or of one with a chunk per stage."""
    return min(request.layout.stages * chunks for _, chunks in request.kinds) - 1


def inner_repeats(microbatches: int, stages: int, fullest: bool = False) -> Repeats:
    """How often the placement program assumes the uncut graph to run, and with how many microbatches in flight: half as
    many as there are stages, the average of 1F1B, or as many as its ``fullest`` stage, the first, has."""
    in_flight = min(microbatches, stages if fullest else math.ceil((stages + 1) / 2))
    return Repeats(microbatches, in_flight, accumulates=True, stages=stages)


def _too_full(request: PipelineRequest, worst: _Overfull) -> InfeasibleError:
    known, alike = math.isfinite(worst.share), len(set(request.limits)) == 1
    within = "" if alike or not known else f", where it may hold {worst.limit:.0f}"
    fullest = f"; the fullest stage of the best cut needs {worst.bytes}{within}" if known else ""
    limits = f"{request.limits[0]:.0f}" if alike else ", ".join(f"{limit:.0f}" for limit in request.limits)
    return InfeasibleError(
        f"{_where(request.layout)} with {request.microbatches} microbatches do "
        f"not fit into {limits} bytes per device{fullest}. More stages or microbatches hold less each"
    ).needing(worst.bytes if known and alike else None)


def _where(layout: StageLayout) -> str:
    return layout.described if layout.counts else f"{layout.stages} stages on meshes {layout.mesh}"
