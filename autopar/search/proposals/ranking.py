"""Ranks the divisions of many devices, best first: what each takes at least comes before what it is estimated to take.

A division is first known by the program of one device: tensor ranks at best share its seconds and bytes. If that may be
the quickest, the program of its tensor ranks is solved, which many divisions share; if that still may be, its
schedules are estimated. Few programs are solved so, and few schedules simulated."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.layout import Layout, divisors
from autopar.planner.request import PlanRequest, memory_limit_of

from .stage_costs import PlacedStage
from .stage_programs import StagePrograms, restriction
from .step_estimates import estimated_seconds

# Samples of a microbatch of one data rank that are tried. Chosen: larger ones leave few microbatches to a pipeline.
MICROBATCHES = (1, 2, 4, 8)
# The most tensor ranks. Chosen: more devices than a node of eight has never share one layer in practice.
MOST_TENSOR_RANKS = 8


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """Tensor ranks, pipeline stages, data ranks, and the samples of a microbatch."""

    tensor: int
    pipeline: int
    data: int
    samples: int

    @property
    def layout(self) -> Layout:
        return restriction(self.tensor, self.pipeline, self.data, self.samples)

    @property
    def ranks(self) -> tuple[int, int, int]:
        return self.tensor, self.pipeline, self.data


@dataclass
class Ranking:
    """The divisions of a request by their estimates. ``known``: what each takes in seconds, or at least; infinite if it
    does not fit."""

    request: PlanRequest
    programs: StagePrograms
    known: dict[Degrees, float] = field(default_factory=dict)
    estimated: set[Degrees] = field(default_factory=set)

    def every(self, pipeline: Sequence[int] = ()) -> Iterator[Degrees]:
        """All divisions with stages, those alone that have a number of them in ``pipeline`` if that is given."""
        devices = math.prod(self.request.mesh)
        for tensor in divisors(self.node):
            for stages in pipeline or divisors(devices // tensor)[1:]:
                if devices // tensor % stages == 0:
                    yield from self._of_ranks(tensor, stages)

    def _of_ranks(self, tensor: int, stages: int) -> Iterator[Degrees]:
        data = math.prod(self.request.mesh) // (tensor * stages)
        for samples in MICROBATCHES:
            if self.request.batch % (data * samples) == 0:
                yield Degrees(tensor, stages, data, samples)

    @cached_property
    def node(self) -> int:
        """The devices that the innermost link joins, at most :data:`MOST_TENSOR_RANKS` of them."""
        devices = math.prod(self.request.mesh)
        inner = self.request.cluster.links[0].size or devices
        return math.gcd(min(inner, MOST_TENSOR_RANKS), devices)

    def best_first(self) -> Iterator[Degrees]:
        """All divisions with stages that fit, the quickest by its estimate first."""
        waiting = [(self._least_alone(division), 0, division) for division in self.every()]
        heapq.heapify(waiting)
        while waiting:
            seconds, steps, division = heapq.heappop(waiting)
            self.known[division] = seconds
            if math.isinf(seconds):
                continue
            if steps == 2:
                yield division
            elif steps == 1:
                heapq.heappush(waiting, (self.estimate(division), 2, division))
            else:
                heapq.heappush(waiting, (max(seconds, self._least(division)), 1, division))
        
    def estimate(self, division: Degrees) -> float:
        """The estimated seconds of a division; infinite if it does not fit."""
        if division not in self.estimated:
            self.estimated.add(division)
            self.known[division] = self._estimate(division)
        return self.known[division]

    def bound(self, division: Degrees) -> float:
        """What a division takes at least, as far as it is known."""
        if division not in self.known:
            self.known[division] = self._least_alone(division)
        return self.known[division]

    def _estimate(self, division: Degrees) -> float:
        least, limit = math.inf, memory_limit_of(self.request)
        devices = division.data * division.tensor
        for placed in self._that_may_fit(division, self._placed(division), 1):
            if self._seconds(placed, division, 1) >= least:
                break
            costs = placed.costs(division.data)
            count = self._microbatches(division)
            own = estimated_seconds(costs, self.request.cluster, division.pipeline, devices, count, limit)
            least = min(least, own)
        return least

    def _placed(self, division: Degrees) -> tuple[PlacedStage, ...]:
        return self.programs.placed(division.tensor, division.samples)

    def _least_alone(self, division: Degrees) -> float:
        """What a division takes at least by the program of one device."""
        alone = self.programs.placed(1, division.samples)
        found = self._that_may_fit(division, alone, division.tensor)
        return min((self._seconds(placed, division, division.tensor) for placed in found), default=math.inf)

    def _least(self, division: Degrees) -> float:
        found = self._that_may_fit(division, self._placed(division), 1)
        return min((self._seconds(placed, division, 1) for placed in found), default=math.inf)

    def _seconds(self, placed: PlacedStage, division: Degrees, ranks: int) -> float:
        """Seconds if ``ranks`` share those of ``placed``, and stages idle as little as in any named schedule: a sixth
        of what 1F1B idles (:mod:`autopar.search.attempts`)."""
        count = self._microbatches(division)
        return placed.seconds / ranks / division.pipeline * (count + (division.pipeline - 1) / 6.0)

    def _that_may_fit(
        self, division: Degrees, every: Sequence[PlacedStage], ranks: int
    ) -> Iterator[PlacedStage]:
        """Those of ``every`` that may fit if ``ranks`` share their bytes: on average, stages of 1F1B have half as many
        microbatches in flight as there are stages."""
        room = memory_limit_of(self.request) * division.pipeline * ranks
        in_flight = (min(self._microbatches(division), division.pipeline) + 1) / 2.0
        for placed in every:
            static = placed.static(self._most_data if ranks > 1 else division.data)
            if static + in_flight * placed.saved <= room:
                yield placed

    @cached_property
    def _most_data(self) -> int:
        return math.prod(self.request.mesh)

    def _microbatches(self, division: Degrees) -> int:
        return self.request.batch // (division.data * division.samples)
