"""The schedules of one placed graph: its cuts for each, in the order of their estimates, and their exact prices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.ir.staged_graph import Staged
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.cut_candidates import CutCandidate
from autopar.passes.pipeline.microbatch import Microbatched
from autopar.placement.breakdown import CostBreakdown
from autopar.planner.mesh_solution import MeshSolution
from autopar.schedule.actions import Edge as Link
from autopar.schedule.named import make_schedule
from autopar.schedule.schedule import Schedule
from autopar.search.schedules.chunks import place_chunks
from autopar.search.schedules.cuts import Segments
from autopar.search.schedules.schedule_estimates import Arranged, Estimates, cuts_at, cuts_of, cuts_with
from autopar.search.stage_prices.pipeline_breakdown import price_stages, shared_processors, slowest_wire, wire_prices
from autopar.solver.problem import Ints

from .pipeline_request import PipelineRequest
from .pipeline_solution import PipelineSolution, planned_pipeline
from .rehearsed_memory import fits, peaks_within
from .segments import pinned_ranks, price_segments
from .stage_devices import breakdowns_on_blocks, kinds_of_blocks, orders, prices_on_blocks
from .stage_meshes import StageLayout

# How far above its limit a rank may be for a schedule to be worth another cut, or placements with less memory.
# Chosen: by more, much would have to be saved.
JUST_OVER = 1.1
# The share of its limit that a rank of that cut is to fill. Chosen: estimates and prices agree about cuts that are
# nearly alike.
RECUT = 0.995


def kinds_within(request: PipelineRequest, segments: int) -> list[tuple[str, int]]:
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


@dataclass(frozen=True)
class FittingSchedules:
    """The schedules for which a graph has enough cuts, placed as ``solved``: those that were ``found``, with the
    share of its limit that the fullest rank holds at least. ``pinned``: for each segment, the rank that must hold it
    (-1: any)."""

    request: PipelineRequest
    pieces: Microbatched
    solved: tuple[MeshSolution, ...]
    estimates: Estimates
    pinned: Ints
    found: tuple[tuple[Arranged, tuple[str, ...]], ...]
    fullness: tuple[float, ...]
    nearest: bool

    def solutions(self) -> Iterator[PipelineSolution]:
        """Solutions in the order of their estimates; of those alone that may fit. If none may, that which is nearest
        to it, if asked for. Of several cuts for one schedule those after the first that fits are left out, and so are
        all whose estimate is above the seconds of one that fits: estimates are mostly a little too low. Where stages
        are rehearsed, so are those that are estimated to hold no less than one that does not fit."""
        fitting = [each for each, share in zip(self.found, self.fullness, strict=True) if share <= 1.0]
        if self.found and self.nearest and not fitting:
            fitting = [self.found[self.fullness.index(min(self.fullness))]]
        done, least, too_full = set[Arranged](), math.inf, math.inf
        for chosen in self.estimates.in_order(fitting):
            if not self.estimates.is_below(chosen, least):
                return
            share = self.estimates.fullness(chosen, self.request.limits)
            for solution in self._solved(chosen) if chosen[0] not in done and share < too_full else ():
                yield solution
                if fits(solution, self.request.limits, self.request.host_limit):
                    done.add(chosen[0])
                    least = min(least, solution.seconds)
                elif self.request.aims is not None:
                    too_full = min(too_full, share)

    def _solved(self, chosen: tuple[Arranged, tuple[str, ...]]) -> Iterator[PipelineSolution]:
        """A schedule as it is cut and, if that just does not fit, cut with as much less memory as it lacks."""
        solution = self._cut(*chosen)
        yield solution
        limits = self.request.limits
        spare = [
            RECUT * limit / max(peak, 1) for limit, peak in zip(limits, peaks_within(solution, limits), strict=True)
        ]
        if RECUT > min(spare) >= RECUT / JUST_OVER:
            cuts = cuts_with(self.estimates.on_blocks, chosen, self.pinned, spare)
            if cuts is not None and (chosen[0], cuts) not in self.found:
                yield self._cut(chosen[0], cuts)

    def _cut(self, arranged: Arranged, cuts: tuple[str, ...]) -> PipelineSolution:
        return cut_and_price(self.request.layout, self.pieces, cuts, arranged, self.solved, self.request.cluster)

    def fullness_of_quicker(self, seconds: float) -> float | None:
        """How full the fullest rank would be of the schedule that is nearest to fitting, of those that exceed the limit
        by at most a factor of :data:`JUST_OVER` and are estimated to take less than ``seconds``; None if there is
        none."""
        over = [pair for pair in zip(self.fullness, self.found, strict=True) if 1.0 < pair[0] <= JUST_OVER]
        shares = (
            share for share, each in sorted(over, key=lambda pair: pair[0]) if self.estimates.is_below(each, seconds)
        )
        return next(shares, None)

    @property
    def least_seconds(self) -> float:
        """The estimate of the quickest schedule, whether it fits or not; infinite if there is none."""
        quickest = next(self.estimates.in_order(self.found), None)
        return math.inf if quickest is None else self.estimates.seconds(quickest)

    def is_any_quicker(self, seconds: float) -> bool:
        """Whether a schedule that does not fit is estimated to take less than ``seconds``."""
        over = (each for share, each in zip(self.fullness, self.found, strict=True) if share > 1.0)
        return any(self.estimates.is_below(each, seconds) for each in over)


def schedules_of(
    request: PipelineRequest,
    pieces: Microbatched,
    candidates: tuple[CutCandidate, ...],
    segment_of: dict[str, int],
    solved: tuple[MeshSolution, ...],
    nearest: bool,
) -> FittingSchedules:
    """The schedules of the request, cut where their estimates are best."""
    layout, cluster = request.layout, request.cluster
    stages = layout.stages
    priced = breakdowns_on_blocks(solved, cluster)
    on_blocks = _on_blocks(request, pieces, candidates, segment_of, solved, priced)
    count = on_blocks[0].count
    pinned = pinned_ranks(pieces.graph, segment_of, count, request.pins, stages)
    kinds = kinds_within(request, count)
    alike = kinds_of_blocks(cluster, layout.blocks)
    tried = orders(alike, [breakdown.seconds for breakdown in priced], request.limits, pinned.tolist())
    placed = [Arranged(kind, order, request.microbatches) for kind in kinds for order in tried]
    unlimited = (math.inf,) * stages
    if request.pins and not any(cuts_at(on_blocks, arranged, pinned, unlimited) for arranged in placed):
        raise OptionsError(
            f"no cut into {stages} stages keeps the pins {request.pins}: stages follow each other in the order of the "
            "forward, and each has something to compute"
        )
    found = [(arranged, cuts) for arranged in placed for cuts in cuts_of(on_blocks, arranged, request.aimed, pinned)]
    estimates = Estimates(on_blocks, shared_processors(cluster, layout.sizes))
    fullness = tuple(estimates.fullness(each, request.aimed) for each in found)
    return FittingSchedules(request, pieces, solved, estimates, pinned, tuple(found), fullness, nearest)


def _on_blocks(
    request: PipelineRequest,
    pieces: Microbatched,
    candidates: tuple[CutCandidate, ...],
    segment_of: dict[str, int],
    solved: tuple[MeshSolution, ...],
    priced: tuple[CostBreakdown, ...],
) -> tuple[Segments, ...]:
    """The segments between ``candidates``, as ``priced`` on each block of devices."""
    slowest = slowest_wire(request.cluster, request.layout.blocks)
    segments: dict[int, Segments] = {}
    for own, prices, breakdown in zip(solved, prices_on_blocks(solved), priced, strict=True):
        if id(breakdown) not in segments:  # Equal blocks have one breakdown.
            own_segments = price_segments(pieces.graph, candidates, segment_of, own, prices, breakdown, slowest)
            segments[id(breakdown)] = own_segments
    return tuple(segments[id(breakdown)] for breakdown in priced)


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
