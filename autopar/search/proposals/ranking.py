"""Ranks the divisions of many devices, best first: what each takes at least comes before what it is estimated to take.

A division is first known by the program of one device: tensor ranks at best share its seconds and bytes. If that may be
the quickest, the program of its tensor ranks is solved, which many divisions share; if that still may be, its
schedules are estimated. Few programs are solved so, and few schedules simulated."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from autopar.layout import Layout, divisors
from autopar.planner.request import NEAR, PlanRequest, memory_limit_of
from autopar.search.chunks import WirePrice
from autopar.search.schedules.schedule_estimates import Arranged

from .closed_form import ClosedForms, Kind, Totals
from .stage_costs import PlacedStage
from .stage_programs import StagePrograms, restriction
from .step_estimates import estimated_seconds

# Samples of a microbatch of one data rank that are tried. Chosen: larger ones leave few microbatches to a pipeline.
MICROBATCHES = (1, 2, 4, 8)
# The most tensor ranks. Chosen: more devices than a node of eight has never share one layer in practice.
MOST_TENSOR_RANKS = 8
# The most stages. Chosen: published pipelines have up to 64, and deeper ones take long to simulate, and to cut.
MOST_STAGES = 64
# Stages of which an estimate is only made if the closed form itself may be the quickest: it takes seconds. Chosen.
DEEP = 32
# The share of launches from which on a microbatch takes less than in proportion to its samples. Chosen.
LAUNCHES_COUNT = 0.02
# The share of a closed form that an estimate takes at least. Chosen: see docs/layouts.md.
UNSURE = 0.985
Item = TypeVar("Item")


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
                if devices // tensor % stages == 0 and stages <= MOST_STAGES:
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
        """The divisions with stages that fit and are near the quickest, the quickest by its estimate first."""
        waiting = [(self._alone(division), 0, division) for division in self.every()]
        heapq.heapify(waiting)
        least = math.inf
        while waiting:
            seconds, steps, division = heapq.heappop(waiting)
            self.known[division] = seconds
            if math.isinf(seconds) or seconds > NEAR * least:
                return
            if steps == 2:
                least = min(least, seconds)
                yield division
            elif steps == 1:
                heapq.heappush(waiting, (self.estimate(division), 2, division))
            elif (known := self._alone(division)) > seconds:  # By what has been solved meanwhile.
                heapq.heappush(waiting, (known, 0, division))
            else:
                doubt = 1.0 if division.pipeline > DEEP else UNSURE
                heapq.heappush(waiting, (doubt * self._together(division), 1, division))

    def estimate(self, division: Degrees) -> float:
        """The estimated seconds of a division; infinite if it does not fit."""
        if division not in self.estimated:
            self.estimated.add(division)
            self.known[division] = self._estimate(division)
        return self.known[division]

    def bound(self, division: Degrees) -> float:
        """What a division takes at least, as far as it is known."""
        if division not in self.known:
            self.known[division] = self._alone(division)
        return self.known[division]

    def _estimate(self, division: Degrees) -> float:
        count, limit = self._microbatches(division), memory_limit_of(self.request)
        devices, stages = division.data * division.tensor, division.pipeline
        waiting: list[tuple[float, int, Kind]] = []
        placed = self._useful(division)
        for index, each in enumerate(placed):
            kinds = self.forms.kinds(each.totals(division.data), stages, count, limit)
            waiting += [(seconds, index, kind) for seconds, kind in kinds]
        least = math.inf
        for seconds, index, kind in sorted(waiting):
            if UNSURE * seconds >= least:
                break
            costs, arranged = placed[index].costs(division.data), Arranged(kind, tuple(range(stages)), count)
            own = estimated_seconds(costs, self.request.cluster, stages, devices, arranged, limit, least)
            least = min(least, own)
        return least

    def _placed(self, division: Degrees) -> Iterable[PlacedStage]:
        return self.programs.placed(division.tensor, division.samples)

    def _useful(self, division: Degrees) -> list[PlacedStage]:
        """The placements that may be the quickest, the first ones: where one fits under every schedule, those that
        recompute more only take longer."""
        return list(self._until_one_fits(self._placed(division), lambda each: each.totals(division.data), division))

    def _until_one_fits(
        self, items: Iterable[Item], totals: Callable[[Item], Totals], division: Degrees
    ) -> Iterator[Item]:
        count, limit = self._microbatches(division), memory_limit_of(self.request)
        for item in items:
            yield item
            if self.forms.fits(totals(item), division.pipeline, count, limit):
                return

    def _alone(self, division: Degrees) -> float:
        """The closed form of a division by the program of a sample on one device, and by what other microbatches of as
        many tensor ranks send."""
        each, samples = self._on_one_device(division.samples)
        known, sent = self.programs.any_of(division.tensor), 0.0
        if known is not None:
            sent = known[1].totals(self._most_data).sending * division.samples / known[0]

        def shared(totals: Totals) -> Totals:
            own = totals.shared(division.tensor, division.samples // samples)
            return replace(own, seconds=own.seconds + sent)

        useful = self._until_one_fits(each, shared, division)
        return min((self._closed(shared(totals), division) for totals in useful), default=math.inf)

    def _on_one_device(self, samples: int) -> tuple[Iterator[Totals], int]:
        """The program of a microbatch of ``samples`` on one device, or of one sample if that tells what more take."""
        first = next(self._totals_alone(1), None)
        if samples == 1 or first is None or first.launching <= LAUNCHES_COUNT * first.seconds:
            return self._totals_alone(1), 1
        return self._totals_alone(samples), samples

    def _totals_alone(self, samples: int) -> Iterator[Totals]:
        return (placed.totals(self._most_data) for placed in self.programs.placed(1, samples))

    def _together(self, division: Degrees) -> float:
        """The closed form by the program of the tensor ranks."""
        totals = (placed.totals(division.data) for placed in self._useful(division))
        return min((self._closed(each, division) for each in totals), default=math.inf)

    def _closed(self, totals: Totals, division: Degrees) -> float:
        count, limit = self._microbatches(division), memory_limit_of(self.request)
        return self.forms.seconds(totals, division.pipeline, count, limit)

    @cached_property
    def forms(self) -> ClosedForms:
        """Those of the model on one device, with messages that are free."""
        alone = next(self.programs.placed(1, 1)).costs(self._most_data)
        return ClosedForms(alone.over(WirePrice(0.0, math.inf)).segments)

    @cached_property
    def _most_data(self) -> int:
        return math.prod(self.request.mesh)

    def _microbatches(self, division: Degrees) -> int:
        return self.request.batch // (division.data * division.samples)
