"""The estimated step of a division: its best schedule, by the seconds of segments, reductions and updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.cluster.description import Cluster
from autopar.cost.pipeline.prices import ChunkPrice, PipelinePrices
from autopar.passes.lower.emit import IN_FLIGHT
from autopar.placement.overlap_windows import HiddenShares, SectionSeconds, shares_of_sizes
from autopar.placement.prices import BUCKET_BYTES
from autopar.search.schedules.schedule_estimates import Arranged, Estimates, chunk_starts, cuts_of
from autopar.search.stage_meshes import StageLayout
from autopar.search.stage_prices.chunk_price import price_of_sections
from autopar.search.stage_prices.pipeline_breakdown import shared_processors, slowest_wire

from .stage_costs import StageCosts


@dataclass(frozen=True)
class StepEstimates(Estimates):
    """Estimates of steps of stages with ``costs`` each, reductions and updates included."""

    costs: StageCosts
    cluster: Cluster

    def prices(self, arranged: Arranged, cuts: tuple[str, ...]) -> PipelinePrices:
        spans = pairwise(chunk_starts(self.on_blocks, cuts))
        update = np.bincount(arranged.placement, [self.costs.update[a:b].sum() for a, b in spans])
        return replace(super().prices(arranged, cuts), step=float(update.max()), hides=self.cluster.overlaps)

    def chunk(self, block: int, start: int, end: int) -> ChunkPrice:
        seconds = {name: float(each[start:end].sum()) for name, each in self.costs.sections.items()}
        if start == 0:  # Nothing waits for gradients of the first chunk.
            seconds["weight_gradient"] += seconds.pop("input_gradient")
        reduce = float(self.costs.reduce[start:end].sum())
        sizes = [size for each in self.costs.weights[start:end] for size in each]
        shares = shares_of_sizes(sizes, sum(sizes), self.cluster) if sizes else HiddenShares()
        first_buckets = min(1.0, IN_FLIGHT * BUCKET_BYTES / max(sum(sizes), 1))
        # Gathers, of which some are hidden, are part of the seconds.
        sides = {name: SectionSeconds(computing) for name, computing in seconds.items()}
        price = price_of_sections(seconds, sides, shares, reduce)
        return replace(price, unawaited=shares.reductions * first_buckets * reduce)


def estimated_seconds(
    costs: StageCosts, cluster: Cluster, stages: int, devices: int, arranged: Arranged, limit: float, least: float
) -> float:
    """Seconds of ``stages`` of so many ``devices`` each as ``arranged``, cut as is best within ``limit`` bytes of each
    device; infinite if nothing fits, or if ``least`` seconds are not reached."""
    layout = StageLayout(stages, (devices,), (0,))
    costs = costs.over(slowest_wire(cluster, layout.blocks))
    on_blocks, limits = [costs.segments] * stages, (limit,) * stages
    estimates = StepEstimates(on_blocks, shared_processors(cluster, layout.sizes), costs, cluster)
    anywhere = np.full(costs.segments.count, -1, dtype=np.int64)
    found = ((arranged, cuts) for cuts in cuts_of(on_blocks, arranged, limits, anywhere))
    fitting = next((each for each in found if estimates.fullness(each, limits) <= 1.0), None)
    return estimates.seconds(fitting) if fitting and estimates.bound(fitting) < least else math.inf
