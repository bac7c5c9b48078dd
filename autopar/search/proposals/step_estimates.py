"""The estimated step of a division: its best schedule, by the seconds of segments, reductions and updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.cluster.description import Cluster
from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices
from autopar.passes.lower.emit import IN_FLIGHT
from autopar.placement.overlap_windows import HiddenShares, SectionSeconds, shares_of_sizes
from autopar.placement.prices import BUCKET_BYTES
from autopar.search.chunks import WirePrice
from autopar.search.pipeline_breakdown import shared_processors, wire_prices
from autopar.search.pipeline_request import schedule_choices
from autopar.search.schedules.schedule_estimates import Arranged, Estimates, chunk_starts, cuts_of
from autopar.search.stage_meshes import StageLayout

from .stage_costs import SECTIONS, StageCosts

Chosen = tuple[Arranged, tuple[str, ...]]


@dataclass(frozen=True)
class StepEstimates(Estimates):
    """Estimates of steps of stages with ``costs`` each, reductions and updates included."""

    costs: StageCosts
    cluster: Cluster

    def prices(self, arranged: Arranged, cuts: tuple[str, ...]) -> PipelinePrices:
        starts, placement = chunk_starts(self.on_blocks, cuts), arranged.placement
        spans, wire = list(pairwise(starts)), self.costs.segments.wire
        edges = {
            (c, c + 1): EdgePrice(latency=float(wire[starts[c + 1]]))
            for c, pair in enumerate(pairwise(placement))
            if pair[0] != pair[1]
        }
        update = np.zeros(len(arranged.order))
        for rank, (a, b) in zip(placement, spans, strict=True):
            update[rank] += self.costs.update[a:b].sum()
        chunks = tuple(self._chunk(a, b) for a, b in spans)
        return PipelinePrices(chunks, edges, float(update.max()), hides=self.cluster.overlaps, shared=self.shared)

    def _chunk(self, start: int, end: int) -> ChunkPrice:
        """The price of a chunk of segments ``start`` to ``end - 1``."""
        forward, first, second = (float(self.costs.sections[name][start:end].sum()) for name in SECTIONS)
        reduce = float(self.costs.reduce[start:end].sum())
        sizes = [size for each in self.costs.weights[start:end] for size in each]
        shares = shares_of_sizes(sizes, sum(sizes), self.cluster) if sizes else HiddenShares()
        first_buckets = min(1.0, IN_FLIGHT * BUCKET_BYTES / max(sum(sizes), 1))
        return ChunkPrice(
            forward,
            first,
            second,
            reduce=reduce,
            overlap_weight_gradient=shares.of_reductions(SectionSeconds(second), reduce),
            overlap_backward=shares.of_reductions(SectionSeconds(first + second), reduce),
            unawaited=shares.reductions * first_buckets * reduce,
        )


def estimated_seconds(
    costs: StageCosts, cluster: Cluster, stages: int, devices: int, microbatches: int, limit: float
) -> float:
    """Seconds of the quickest schedule of ``stages`` of so many ``devices`` each that fits into ``limit`` bytes of each
    device; infinite if none does."""
    layout = StageLayout(stages, (devices,), (0,))
    costs = costs.over(_slowest_link(cluster, layout))
    on_blocks, limits = [costs.segments] * stages, (limit,) * stages
    estimates = StepEstimates(on_blocks, shared_processors(cluster, layout.sizes), costs, cluster)
    fitting = [each for each in _cut(costs, stages, microbatches, limits) if estimates.fullness(each, limits) <= 1.0]
    least = math.inf
    for bound, each in sorted(((estimates.bound(each), each) for each in fitting), key=lambda pair: pair[0]):
        if bound >= least:
            break
        least = min(least, estimates.seconds(each))
    return least


def _cut(costs: StageCosts, stages: int, microbatches: int, limits: Sequence[float]) -> Iterator[Chosen]:
    """The schedules for which there are enough segments, with their best cuts."""
    anywhere = np.full(costs.segments.count, -1, dtype=np.int64)
    for kind in schedule_choices(stages, None):
        if stages * kind[1] <= costs.segments.count:
            arranged = Arranged(kind, tuple(range(stages)), microbatches)
            for cuts in cuts_of([costs.segments] * stages, arranged, limits, anywhere):
                yield arranged, cuts


def _slowest_link(cluster: Cluster, layout: StageLayout) -> WirePrice:
    """The slowest wire between neighbours."""
    pairs = tuple((stage, (stage + 1) % layout.stages) for stage in range(layout.stages))
    links = wire_prices(cluster, tuple(range(layout.stages)), layout.blocks, pairs)
    return min(links.values(), key=lambda link: link.bandwidth)
