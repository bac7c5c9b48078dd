"""The quickest pipeline for one way to divide the devices into stages and the batch into microbatches.

The placement program is solved once, for the graph of one microbatch on the mesh inside a stage. Its answer prices
every node; from these prices come the cuts (:mod:`.cuts`) and, for each schedule, the simulated step
(:mod:`.pipeline_breakdown`). The quickest step wins.

The memory of the uncut graph is taken for that of all stages together; a stage that turns out too full asks for a
solution with less memory, a few times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices, SharedProcessors
from autopar.cost.pipeline.simulate import simulate
from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.ir.planned_pipeline import PlannedPipeline
from autopar.ir.staged_graph import Staged
from autopar.options import SOLVED
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.cut_candidates import CutCandidate, cut_candidates
from autopar.passes.pipeline.microbatch import Microbatched, microbatch
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.planner.infeasible import check_host
from autopar.planner.mesh_solution import MeshSolution
from autopar.schedule.actions import Edge as Link
from autopar.schedule.named import SCHEDULES, make_schedule
from autopar.schedule.schedule import Schedule
from autopar.solver.problem import Ints

from .chunks import WirePrice, place_chunks
from .cuts import Segments, best_cuts
from .pipeline_breakdown import PipelineBreakdown, in_flight_of_chunks, price_stages, shared_processors, wire_prices
from .pipeline_record import planned_pipeline
from .segments import PinnedTogetherError, pinned_ranks, price_segments, segment_of_nodes
from .stage_meshes import StageLayout

# How often the program is solved, with less memory each time. Chosen: each round costs a solve.
ROUNDS = 3
# Schedules that fit into memory and are priced exactly, of those whose estimates are best.
# Chosen: an exact price takes longer than an estimate, and the second best estimate may be the better schedule.
PRICED = 2
# Chunks of a stage that are tried. Chosen: each more multiplies messages.
MOST_CHUNKS = 4


@dataclass(frozen=True)
class PipelineSolution:
    """A cut, placed and scheduled graph; ``whole`` is the answer of the placement program for the uncut graph of one
    microbatch."""

    layout: StageLayout
    whole: MeshSolution
    breakdown: PipelineBreakdown
    pipeline: PlannedPipeline

    @property
    def seconds(self) -> float:
        return self.breakdown.seconds


@dataclass(frozen=True)
class PipelineRequest:
    """What is searched: the concrete step ``graph`` (no rests) at the whole batch, how to divide it, and what is
    fixed. ``inputs``: along which dim each is divided. ``memory_limit`` and ``host_limit`` are bytes for each device;
    ``solve`` solves the placement program of a graph with rests within so many of the device and of the host."""

    graph: Graph
    inputs: Mapping[str, int | None]
    layout: StageLayout
    microbatches: int
    schedule: str | None
    pins: dict[str, str]
    memory_limit: float
    solve: Callable[[Graph, Repeats, float, float], MeshSolution]
    host_limit: float = math.inf


def search(request: PipelineRequest) -> PipelineSolution:
    """The quickest pipeline for one layout and number of microbatches.

    Raises:
        InfeasibleError: no stage division fits into memory, of the devices or of their hosts.
        OptionsError: the batch does not divide, the model has too few places to cut, or a pin cannot be met.
    """
    pieces = microbatch(request.graph, request.microbatches, request.inputs)
    candidates, where = _candidates(request, pieces.graph)
    stages, worst = request.layout.stages, math.inf
    limit, host = request.memory_limit * stages, request.host_limit * stages
    for _ in range(ROUNDS):
        whole = request.solve(SaveActivations()(pieces.graph), inner_repeats(request.microbatches, stages), limit, host)
        found: list[PipelineSolution] = []
        fitting: list[PipelineSolution] = []
        for made in _scheduled(request, pieces, candidates, where, whole):
            found.append(made)
            fitting += [made] if _fits(request, made) else []
            if len(fitting) == PRICED:
                break
        if fitting:
            return min(fitting, key=lambda solution: solution.seconds)
        host_bytes = min((solution.breakdown.host_bytes for solution in found), default=0)
        if host_bytes > request.host_limit:
            # 5% less than what would just fit: chosen, so that few rounds are needed.
            host *= 0.95 * request.host_limit / host_bytes
            continue
        worst = min([worst, *(float(max(solution.breakdown.peaks)) for solution in found)])
        # As above; a fifth less where nothing could be cut at all.
        limit *= 0.95 * min(1.0, request.memory_limit / worst) if math.isfinite(worst) else 0.8
    check_host(whole.prices.cluster, host_bytes, request.host_limit)
    raise _too_full(request, worst)


def _fits(request: PipelineRequest, made: PipelineSolution) -> bool:
    return max(made.breakdown.peaks) <= request.memory_limit and made.breakdown.host_bytes <= request.host_limit


def _candidates(request: PipelineRequest, graph: Graph) -> tuple[tuple[CutCandidate, ...], dict[str, int]]:
    """Where the graph may be cut, and the segment of each node: at the best places, or at so many more that what pins
    want on different stages can be cut apart. Raises :class:`OptionsError` if nothing does that."""
    least = _least_cuts(request)
    while True:
        found = cut_candidates(graph, least) if request.layout.stages > 1 else ()
        where = segment_of_nodes(graph, found)
        try:
            pinned_ranks(graph, where, len(found) + 1, request.pins, request.layout.stages)
        except PinnedTogetherError:
            if len(found) < least:
                raise
            least = len(found) + 1
        else:
            return found, where


def _least_cuts(request: PipelineRequest) -> int:
    """How many cuts some schedule needs: that which is asked for, or one with a chunk a stage."""
    return (
        min((request.layout.stages * chunks for _, chunks in schedule_choices(request.layout.stages, request.schedule)))
        - 1
    )


def inner_repeats(microbatches: int, stages: int) -> Repeats:
    """How the placement program takes the uncut graph: on average over stages, half as many microbatches are in flight
    as there are stages."""
    in_flight = min(microbatches, math.ceil((stages + 1) / 2))
    return Repeats(microbatches, in_flight, accumulates=True, stages=stages)


def _too_full(request: PipelineRequest, worst: float) -> InfeasibleError:
    least = f"; the fullest stage of the best cut needs {worst:.0f}" if math.isfinite(worst) else ""
    return InfeasibleError(
        f"{request.layout.stages} stages on meshes {request.layout.mesh} with {request.microbatches} microbatches do "
        f"not fit into {request.memory_limit:.0f} bytes per device{least}. More stages or microbatches hold less each"
    )


def schedule_choices(stages: int, asked: str | None) -> Iterator[tuple[str, int]]:
    """Names of schedules with the chunks per stage to try them with. One made to measure starts from the cut of the
    best of them."""
    asked = None if asked == SOLVED else asked
    if stages == 1 and asked is None:
        yield "1f1b", 1
        return
    for name, named in SCHEDULES.items():
        if asked in (None, name):
            most = min(named.most or MOST_CHUNKS, MOST_CHUNKS)
            yield from ((name, chunks) for chunks in range(named.least, most + 1) if chunks == 1 or name != "gpipe")


@dataclass(frozen=True)
class _Cut:
    """A schedule (name, chunks per stage) with the cuts that suit it, and the step estimated from its segments."""

    kind: tuple[str, int]
    cuts: tuple[str, ...]
    estimate: float


def _scheduled(
    request: PipelineRequest,
    pieces: Microbatched,
    candidates: tuple[CutCandidate, ...],
    where: dict[str, int],
    whole: MeshSolution,
) -> Iterator[PipelineSolution]:
    """Answers for the schedules the graph has enough cuts for, those that promise most first."""
    stages = request.layout.stages
    links = wire_prices(whole.prices.cluster, tuple(range(stages)), math.prod(request.layout.mesh), _ring(stages))
    slowest = min(links.values(), key=lambda link: link.bandwidth)
    segments = price_segments(pieces.graph, candidates, where, whole, slowest)
    pinned = pinned_ranks(pieces.graph, where, len(candidates) + 1, request.pins, stages)
    kinds = [k for k in schedule_choices(stages, request.schedule) if stages * k[1] <= segments.count]
    if not kinds:
        raise OptionsError(
            f"stages={stages}: the model has {segments.count} regions between places where it can be cut; that many "
            "stages at most (chunks of interleaved schedules counted)"
        )
    if request.pins and not any(_cuts_at(segments, kind, request, pinned, math.inf) for kind in kinds):
        raise OptionsError(
            f"no cut into {stages} stages keeps the pins {request.pins}: stages follow each other in the order of the "
            "forward, and each has something to compute"
        )
    shared = shared_processors(whole.prices.cluster, stages, whole.prices.devices)
    found = [cut for kind in kinds if (cut := _cut_for(request, segments, kind, pinned, slowest, shared)) is not None]
    for chosen in sorted(found, key=lambda one: one.estimate):
        yield cut_and_price(request.layout, pieces, chosen.cuts, chosen.kind, whole)


def _cut_for(
    request: PipelineRequest,
    segments: Segments,
    kind: tuple[str, int],
    pinned: Ints,
    link: WirePrice,
    shared: SharedProcessors | None,
) -> _Cut | None:
    """The best cuts for a schedule, None if no cut fits into memory."""
    # The chunks of a rank share its memory: each may take its part of it.
    cuts = _cuts_at(segments, kind, request, pinned, request.memory_limit / kind[1])
    if cuts is None:
        return None
    schedule = make_schedule(kind[0], request.layout.stages, request.microbatches, kind[1])
    return _Cut(kind, cuts, simulate(schedule, _estimated(segments, cuts, schedule, link, shared)).seconds)


def _cuts_at(
    segments: Segments, kind: tuple[str, int], request: PipelineRequest, pinned: Ints, limit: float
) -> tuple[str, ...] | None:
    """The best cuts for a schedule with at most ``limit`` bytes a chunk, None if there are none."""
    schedule = make_schedule(kind[0], request.layout.stages, request.microbatches, kind[1])
    return best_cuts(segments, in_flight_of_chunks(schedule), limit, np.array(schedule.placement), pinned)


def _estimated(
    segments: Segments, cuts: tuple[str, ...], schedule: Schedule, link: WirePrice, shared: SharedProcessors | None
) -> PipelinePrices:
    """Prices of a chain of chunks as the segments have them: a third of the time each for forward, input gradient and
    weight gradient."""
    starts = [0, *(segments.starts.index(name) + 1 for name in cuts), segments.count]
    seconds = [float(segments.seconds[a:b].sum()) / 3.0 for a, b in pairwise(starts)]
    edges = {
        (c, c + 1): EdgePrice(latency=float(segments.wire[start]))
        for c, start in enumerate(starts[1:-1])
        if schedule.placement[c] != schedule.placement[c + 1]
    }
    return PipelinePrices(tuple(ChunkPrice(s, s, s) for s in seconds), edges, shared=shared)


def _ring(stages: int) -> tuple[tuple[int, int], ...]:
    return tuple((s, (s + 1) % stages) for s in range(stages))


def cut_and_price(
    layout: StageLayout, pieces: Microbatched, cuts: tuple[str, ...], kind: tuple[str, int], whole: MeshSolution
) -> PipelineSolution:
    """The graph cut at ``cuts`` under the schedule ``kind`` (name, chunks per stage): placed and priced."""
    staged = cut(pieces, cuts)
    schedule = scheduled(kind, layout.stages, pieces.count, staged)
    return price_schedule(layout, staged, cuts, schedule, whole)


def price_schedule(
    layout: StageLayout, staged: Staged, cuts: tuple[str, ...], schedule: Schedule, whole: MeshSolution
) -> PipelineSolution:
    """The cut graph under ``schedule``: placed as ``whole`` chooses, and priced."""
    pairs = tuple((edge.source, edge.target) for edge in staged.edges)
    links = wire_prices(whole.prices.cluster, schedule.placement, math.prod(layout.mesh), pairs)
    chunks, wires = place_chunks(staged, whole.assignment, whole.prices, links)
    breakdown = price_stages(chunks, wires, schedule, whole.prices, links, whole.instance.optimizer)
    return PipelineSolution(layout, whole, breakdown, planned_pipeline(cuts, breakdown, wires, whole.prices))


def scheduled(kind: tuple[str, int], stages: int, microbatches: int, staged: Staged) -> Schedule:
    """The named schedule over the links of a cut graph; a link has a gradient to bring back if backward values are sent
    there."""
    back = {(edge.target, edge.source) for edge in staged.edges if edge.phase == "backward"}
    forward = {(edge.source, edge.target) for edge in staged.edges if edge.phase == "forward"}
    links = tuple(Link(low, high, (low, high) in back) for low, high in sorted(forward | back))
    return make_schedule(kind[0], stages, microbatches, kind[1], links)
