"""A first estimate of a pipeline, in closed form: the best cuts where memory does not bind, and the idling that is
published for each schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autopar.cost import bubble_fraction
from autopar.errors import ScheduleError
from autopar.schedule.named import SCHEDULES
from autopar.search.fitting_schedules import JUST_OVER
from autopar.search.pipeline_request import schedule_choices
from autopar.search.schedules.chunks import WirePrice
from autopar.search.schedules.cuts import Segments, best_cuts
from autopar.search.schedules.schedule_estimates import chunk_starts

from .stage_costs import StageCosts, Totals

# A schedule, and the chunks of each stage.
Kind = tuple[str, int]


@dataclass(frozen=True, eq=False)
class ClosedForms:
    """The closed forms of pipelines of one model. ``segments``: of all its layers, whose seconds are in proportion in
    all programs."""

    segments: Segments
    _shares: dict[tuple[int, Kind], float] = field(default_factory=dict)

    @staticmethod
    def of(costs: StageCosts) -> ClosedForms:
        """Those of a model whose stages have ``costs``, with messages that are free."""
        return ClosedForms(costs.over(WirePrice(0.0, math.inf)).segments)

    def kinds(self, totals: Totals, stages: int, microbatches: int, limit: float) -> Iterator[tuple[float, Kind]]:
        """Each schedule that may fit into ``limit`` bytes of each device, with its seconds. Cuts may give full stages
        less than their share, so that up to :data:`JUST_OVER` times the limit may fit."""
        for held, name, chunks in self._held(totals, stages, microbatches):
            if held <= JUST_OVER * limit:
                idle = _idle_share(name, stages, microbatches, chunks) / stages
                busy = self._busiest(stages, (name, chunks))
                yield microbatches * totals.seconds * (busy + idle) + totals.once / stages, (name, chunks)

    def fits(self, totals: Totals, stages: int, microbatches: int, limit: float) -> bool:
        """Whether every schedule fits, even where cuts give the fullest stage :data:`JUST_OVER` times its share."""
        return all(JUST_OVER * held <= limit for held, *_ in self._held(totals, stages, microbatches))

    def _held(self, totals: Totals, stages: int, microbatches: int) -> Iterator[tuple[float, str, int]]:
        """What a device holds under each schedule for which there are enough segments."""
        for name, chunks in schedule_choices(stages, None):
            if stages * chunks <= self.segments.count:
                flying = max(SCHEDULES[name].in_flight(rank, stages, microbatches, chunks) for rank in (0, stages - 1))
                yield totals.static / stages + flying * totals.saved / (stages * chunks), name, chunks

    def _busiest(self, stages: int, kind: Kind) -> float:
        """The share of all work that the busiest stage has."""
        if (stages, kind) not in self._shares:
            chunks, own = stages * kind[1], self.segments
            cuts = best_cuts([own] * chunks, (1,) * chunks, (math.inf,) * chunks)
            assert cuts is not None
            work = [own.seconds[a:b].sum() for a, b in pairwise(chunk_starts([own], cuts))]
            busy = np.bincount(SCHEDULES[kind[0]].placement(stages, kind[1]), work)
            self._shares[stages, kind] = float(busy.max() / own.seconds.sum())
        return self._shares[stages, kind]


def _idle_share(name: str, stages: int, microbatches: int, chunks: int) -> float:
    """The ratio of idle to busy time; where none is published, that of 1F1B."""
    try:
        return bubble_fraction(name, stages, microbatches, chunks)
    except ScheduleError:
        return (stages - 1) / microbatches
