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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autopar.cluster.description import Cluster
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
from autopar.placement.prices import Prices
from autopar.planner.infeasible import check_host
from autopar.planner.memory_limit import ShortOfMemoryError
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.shared_work import SharedWork
from autopar.schedule.actions import Edge as Link
from autopar.schedule.named import SCHEDULES, make_schedule
from autopar.schedule.schedule import Schedule
from autopar.search.schedules.cuts import Segments
from autopar.search.schedules.schedule_estimates import Arranged, Estimates, cuts_at, cuts_of
from autopar.solver.problem import memory_of

from .chunks import place_chunks
from .pipeline_breakdown import PipelineBreakdown, price_stages, shared_processors, wire_prices
from .pipeline_record import planned_pipeline
from .segments import PinnedTogetherError, pinned_ranks, price_segments, segment_of_nodes
from .stage_devices import breakdowns_on_blocks, kinds_of_blocks, orders, prices_on_blocks
from .stage_meshes import StageLayout

# How often the program is solved: as if stages held the average, then as if all held what the fullest does, then with
# less and less memory. Chosen: each round costs a solve.
ROUNDS = 4
# How many schedules that fit into memory are priced exactly, in the order of their estimates.
# Chosen: an exact price takes longer than an estimate, and the second best estimate may be the better schedule.
PRICED = 2
# Chunks of a stage that are tried. Chosen: each more multiplies messages.
MOST_CHUNKS = 4


@dataclass(frozen=True)
class PipelineSolution:
    """A cut, placed and scheduled graph. ``solutions`` are those of the placement program for the uncut graph of one
    microbatch, by pipeline rank: one and the same where stages have equal meshes. ``cluster``: of all ranks.
    ``measured``: what has been measured of it, by name; a changed solution begins with nothing."""

    layout: StageLayout
    solutions: tuple[MeshSolution, ...]
    cluster: Cluster
    breakdown: PipelineBreakdown
    pipeline: PlannedPipeline
    measured: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def seconds(self) -> float:
        return self.breakdown.seconds

    @property
    def uncut(self) -> MeshSolution:
        """The solution on the largest mesh, of the first such rank."""
        return max(self.solutions, key=lambda solution: solution.prices.devices)

    @property
    def prices(self) -> tuple[Prices, ...]:
        """By pipeline rank, those of its own devices."""
        return prices_on_blocks(self.solutions)

    @property
    def optimizer(self) -> str:
        return self.uncut.instance.optimizer


@dataclass(frozen=True)
class PipelineRequest:
    """A request for a pipeline: the concrete step ``graph`` at the whole batch, without nodes for saved activations,
    how to divide it, and what is fixed. ``inputs``: the dim along which each is divided. ``limits``: bytes for each
    device, by pipeline rank; ``host_limit``: bytes of the host for each. ``chunks``: of each stage, None searches.
    ``alone``: as for :func:`~autopar.passes.pipeline.microbatch.microbatch`. ``shared``: what other requests have in
    common with this one. ``solve`` solves the placement program of a graph, with nodes for saved activations, for each
    stage, within limits of the bytes of all devices together and of their hosts. ``cluster``: of all devices."""

    graph: Graph
    inputs: Mapping[str, int | None]
    layout: StageLayout
    microbatches: int
    schedule: str | None
    pins: dict[str, str]
    limits: tuple[float, ...]
    solve: Callable[[Graph, Repeats, float, float], tuple[MeshSolution, ...]]
    cluster: Cluster
    host_limit: float = math.inf
    chunks: int | None = None
    alone: Callable[[], Graph] | None = None
    shared: SharedWork = field(default_factory=SharedWork, compare=False, repr=False)

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """The schedules to try, with their numbers of chunks per stage. Raises :class:`OptionsError` if none has
        ``chunks``."""
        stages = self.layout.stages
        every = tuple(schedule_choices(stages, self.schedule, self.chunks or MOST_CHUNKS))
        matching = tuple(kind for kind in every if stages == 1 or self.chunks in (None, kind[1]))
        if not matching:
            raise OptionsError(
                f"interleave={self.chunks}: {self.schedule!r} runs {' or '.join(str(n) for _, n in every)} chunks on "
                "each stage"
            )
        return matching


def search(request: PipelineRequest) -> PipelineSolution:
    """The quickest pipeline for one layout and number of microbatches.

    Raises:
        InfeasibleError: no division into stages fits into the memory of the devices or of their hosts.
        OptionsError: the batch does not divide, the model has too few places to cut, or a pin cannot be met.
    """
    pieces = _pieces(request)
    saving = request.shared.once("saving", (pieces,), make=lambda: SaveActivations()(pieces.graph))
    candidates, segment_of = _candidates(request, pieces.graph)
    _kinds_within(request, len(candidates) + 1)
    stages, worst = request.layout.stages, _Overfull()
    sizes = request.layout.sizes
    limit = sum(own * size for own, size in zip(request.limits, sizes, strict=True))
    host = request.host_limit * sum(sizes)
    average, fullest = (inner_repeats(request.microbatches, stages, fullest=of_one) for of_one in (False, True))
    for repeats in (average, *[fullest] * (ROUNDS - 1)):
        try:
            solved = request.solve(saving, repeats, limit, host)
        except ShortOfMemoryError:
            continue  # As below.
        solutions: list[PipelineSolution] = []
        fitting: list[PipelineSolution] = []
        # How much is too much matters in the last rounds alone.
        for solution in _scheduled(request, pieces, candidates, segment_of, solved, nearest=repeats == fullest):
            solutions.append(solution)
            fitting += [solution] if _fits(request, solution) else []
            if len(fitting) == PRICED:
                break
        if fitting:
            return min(fitting, key=lambda solution: solution.seconds)
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
    check_host(solved[0].prices.cluster, host_bytes, request.host_limit)
    raise _too_full(request, worst)


@dataclass(frozen=True, order=True)
class _Overfull:
    """The rank that exceeds its limit most: ``bytes`` for each of its devices are ``share`` of the ``limit``."""

    share: float = math.inf
    bytes: int = 0
    limit: float = math.inf

    @staticmethod
    def of(request: PipelineRequest, solution: PipelineSolution) -> _Overfull:
        ranks = zip(solution.breakdown.peaks, request.limits, strict=True)
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


def _fits(request: PipelineRequest, solution: PipelineSolution) -> bool:
    within = all(peak <= limit for peak, limit in zip(solution.breakdown.peaks, request.limits, strict=True))
    return within and solution.breakdown.host_bytes <= request.host_limit


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
    )


def _where(layout: StageLayout) -> str:
    return layout.described if layout.counts else f"{layout.stages} stages on meshes {layout.mesh}"


def schedule_choices(stages: int, requested: str | None, most_chunks: int = MOST_CHUNKS) -> Iterator[tuple[str, int]]:
    """Names of schedules with the numbers of chunks per stage to try, up to ``most_chunks``. A solved schedule starts
    from the cuts of the best of them."""
    requested = None if requested == SOLVED else requested
    if stages == 1 and requested is None:
        yield "1f1b", 1
        return
    for name, named in SCHEDULES.items():
        if requested in (None, name):
            most = min(named.most or most_chunks, most_chunks)
            yield from ((name, chunks) for chunks in range(named.least, most + 1) if chunks == 1 or name != "gpipe")


def _kinds_within(request: PipelineRequest, segments: int) -> list[tuple[str, int]]:
    """The schedules to try for which the model has enough ``segments``. Raises :class:`OptionsError` if it has too few
    for any."""
    stages = request.layout.stages
    kinds = [kind for kind in request.kinds if stages * kind[1] <= segments]
    if kinds:
        return kinds
    chunks = min(chunks for _, chunks in request.kinds)
    most = f"; with {stages} stages interleave={segments // stages} is the most" if segments >= stages else ""
    raise OptionsError(
        f"stages={stages}: the model has {segments} regions between places where it can be cut, and at most that many "
        f"stages (counting the chunks of interleaved schedules), not {stages} x {chunks}{most}"
    )


def _scheduled(
    request: PipelineRequest,
    pieces: Microbatched,
    candidates: tuple[CutCandidate, ...],
    segment_of: dict[str, int],
    solved: tuple[MeshSolution, ...],
    nearest: bool,
) -> Iterator[PipelineSolution]:
    """Solutions for the schedules for which the graph has enough cuts, in the order of their estimates; of those alone
    that may fit. If none may, that which is ``nearest`` to it, if asked for."""
    layout, cluster = request.layout, request.cluster
    stages = layout.stages
    links = wire_prices(cluster, tuple(range(stages)), layout.blocks, _ring(stages))
    slowest = min(links.values(), key=lambda link: link.bandwidth)
    priced = breakdowns_on_blocks(solved, cluster)
    segments: dict[int, Segments] = {}
    for own, prices, breakdown in zip(solved, prices_on_blocks(solved), priced, strict=True):
        if id(breakdown) not in segments:  # Equal blocks have one breakdown.
            own_segments = price_segments(pieces.graph, candidates, segment_of, own, prices, breakdown, slowest)
            segments[id(breakdown)] = own_segments
    on_blocks = tuple(segments[id(breakdown)] for breakdown in priced)
    count = on_blocks[0].count
    pinned = pinned_ranks(pieces.graph, segment_of, count, request.pins, stages)
    kinds = _kinds_within(request, count)
    alike = kinds_of_blocks(cluster, layout.blocks)
    tried = orders(alike, [breakdown.seconds for breakdown in priced], request.limits, pinned.tolist())
    placed = [Arranged(kind, order, request.microbatches) for kind in kinds for order in tried]
    unlimited = (math.inf,) * stages
    if request.pins and not any(cuts_at(on_blocks, arranged, pinned, unlimited) for arranged in placed):
        raise OptionsError(
            f"no cut into {stages} stages keeps the pins {request.pins}: stages follow each other in the order of the "
            "forward, and each has something to compute"
        )
    shared = shared_processors(cluster, layout.sizes)
    found = [(arranged, cuts) for arranged in placed for cuts in cuts_of(on_blocks, arranged, request.limits, pinned)]
    estimates = Estimates(on_blocks, shared)
    fullness = [estimates.fullness(each, request.limits) for each in found]
    fitting = [each for each, share in zip(found, fullness, strict=True) if share <= 1.0]
    if found and nearest and not fitting:
        fitting = [found[fullness.index(min(fullness))]]
    for arranged, cuts in estimates.in_order(fitting):
        yield cut_and_price(layout, pieces, cuts, arranged, solved, cluster)


def _ring(stages: int) -> tuple[tuple[int, int], ...]:
    return tuple((s, (s + 1) % stages) for s in range(stages))


def cut_and_price(
    layout: StageLayout,
    pieces: Microbatched,
    cuts: tuple[str, ...],
    arranged: Arranged,
    solved: tuple[MeshSolution, ...],
    cluster: Cluster,
) -> PipelineSolution:
    """Cuts the graph at ``cuts``, places it, and prices it as ``arranged``."""
    staged = cut(pieces, cuts)
    schedule = scheduled(arranged.kind, layout.stages, pieces.count, staged).reordered(arranged.order)
    return price_schedule(layout, staged, cuts, schedule, solved, cluster)


def price_schedule(
    layout: StageLayout,
    staged: Staged,
    cuts: tuple[str, ...],
    schedule: Schedule,
    solved: tuple[MeshSolution, ...],
    cluster: Cluster,
) -> PipelineSolution:
    """Places the cut graph as the solutions of the pipeline ranks choose, and prices it under ``schedule``."""
    pairs = tuple((edge.source, edge.target) for edge in staged.edges)
    links = wire_prices(cluster, schedule.placement, layout.blocks, pairs)
    of_chunks = [solved[rank] for rank in schedule.placement]
    chunks, wires = place_chunks(staged, [s.assignment for s in of_chunks], [s.prices for s in of_chunks], links)
    prices = prices_on_blocks(solved)
    breakdown = price_stages(chunks, wires, schedule, prices, links, solved[0].instance.optimizer, cluster)
    pipeline = planned_pipeline(cuts, breakdown, wires, prices, staged.own_statistics, cluster)
    return PipelineSolution(layout, solved, cluster, breakdown, pipeline)


def scheduled(kind: tuple[str, int], stages: int, microbatches: int, staged: Staged) -> Schedule:
    """The named schedule over the links of a cut graph. A link returns a gradient if backward values are sent over
    it."""
    back = {(edge.target, edge.source) for edge in staged.edges if edge.phase == "backward"}
    forward = {(edge.source, edge.target) for edge in staged.edges if edge.phase == "forward"}
    links = tuple(Link(low, high, (low, high) in back) for low, high in sorted(forward | back))
    return make_schedule(kind[0], stages, microbatches, kind[1], links)
