"""Ranks the divisions of many devices, best first: what each takes at least comes before what it is estimated to take.

A division is first known by the program of one device: tensor ranks at best share its seconds and bytes. If that may be
the quickest, the program of its tensor ranks is solved, which many divisions share; if that still may be, its
schedules are estimated. Few programs are solved so, and few schedules simulated."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from autopar.layout import Layout, divisors
from autopar.planner.request import NEAR, PlanRequest, memory_limit_of
from autopar.search.schedules.schedule_estimates import Arranged

from .closed_form import ClosedForms
from .stage_costs import PlacedStage, Totals
from .stage_programs import StagePrograms, division
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
# That share where microbatches are fewer than stages: gradients are reduced while other stages still compute, which
# the closed form leaves out. Chosen: of a small Llama on 128 devices, estimates are 0.81 of it (one microbatch).
UNSURE_OF_FEW = 0.8
Item = TypeVar("Item")


@dataclass
class Ranking:
    """The divisions of a request, as layouts, by their estimates. ``known``: what each takes in seconds, or at least;
    infinite if it does not fit. ``estimated``: of those that have an estimate of their own."""

    request: PlanRequest
    programs: StagePrograms
    known: dict[Layout, float] = field(default_factory=dict)
    estimated: dict[Layout, float] = field(default_factory=dict)

    def every(self) -> Iterator[Layout]:
        """All divisions with stages."""
        for tensor in divisors(self.node):
            for stages in divisors(self._devices // tensor)[1:]:
                data = self._devices // (tensor * stages)
                for samples in MICROBATCHES if stages <= MOST_STAGES else ():
                    if self.request.batch % (data * samples) == 0:
                        yield division(tensor, stages, data, samples)

    @cached_property
    def node(self) -> int:
        """The devices that the innermost link joins, at most :data:`MOST_TENSOR_RANKS` of them."""
        inner = self.request.cluster.links[0].size or self._devices
        return math.gcd(min(inner, MOST_TENSOR_RANKS), self._devices)

    def best_first(self, worth: float = math.inf) -> Iterator[Layout]:
        """The divisions with stages that fit and are near the quickest, the quickest by its estimate first. The last is
        the first that is known to take more than ``worth`` seconds, whether it has an estimate or not."""
        waiting = [(self._alone(layout), 0, place, layout) for place, layout in enumerate(self.every())]
        heapq.heapify(waiting)
        least = math.inf
        while waiting:
            seconds, steps, place, layout = heapq.heappop(waiting)
            self.known[layout] = seconds
            if math.isinf(seconds) or seconds > NEAR * least:
                return
            if seconds > worth:
                yield layout
                return
            if steps == 2:
                least = min(least, seconds)
                yield layout
            elif steps == 1:
                heapq.heappush(waiting, (self.estimate(layout), 2, place, layout))
            elif (known := self._alone(layout)) > seconds:  # By what has been solved meanwhile.
                heapq.heappush(waiting, (known, 0, place, layout))
            else:
                doubt = self._doubt(layout)
                heapq.heappush(waiting, (doubt * self._together(layout), 1, place, layout))

    def _doubt(self, layout: Layout) -> float:
        if layout.pipeline > DEEP:
            return 1.0
        return UNSURE_OF_FEW if self._has_few(layout) else UNSURE

    def _has_few(self, layout: Layout) -> bool:
        return layout.microbatches(self.request.batch) < layout.pipeline

    def estimate(self, layout: Layout) -> float:
        """The estimated seconds of a division; infinite if it does not fit."""
        if layout not in self.estimated:
            self.known[layout] = self.estimated[layout] = self._estimate(layout)
        return self.estimated[layout]

    def bound(self, layout: Layout) -> float:
        """What a division takes at least, as far as it is known."""
        if layout not in self.known:
            self.known[layout] = self._alone(layout)
        return self.known[layout]

    def _estimate(self, layout: Layout) -> float:
        stages, count, limit = self._division(layout)
        every = [placed.costs(layout.data) for placed in self._useful(layout)]
        waiting = [
            (seconds, index, kind)
            for index, costs in enumerate(every)
            for seconds, kind in self.forms.kinds(costs.totals, stages, count, limit)
        ]
        least = math.inf
        for seconds, index, kind in sorted(waiting):
            if UNSURE * seconds >= least:
                break
            costs, arranged = every[index], Arranged(kind, tuple(range(stages)), count)
            of_stages = costs, self.request.cluster, stages, layout.stage_devices
            least = min(least, estimated_seconds(*of_stages, arranged, limit, least))
        return least

    def _placed(self, layout: Layout) -> Iterable[PlacedStage]:
        return self.programs.placed(layout.tensor, layout.microbatch)

    def _useful(self, layout: Layout) -> list[PlacedStage]:
        """The placements that may be the quickest, the first ones: where one fits under every schedule, those that
        recompute more only take longer."""
        return list(self._until_one_fits(self._placed(layout), lambda placed: placed.costs(layout.data).totals, layout))

    def _until_one_fits(
        self, items: Iterable[Item], totals: Callable[[Item], Totals], layout: Layout
    ) -> Iterator[Item]:
        for item in items:
            yield item
            if self.forms.fits(totals(item), *self._division(layout)):
                return

    def _alone(self, layout: Layout) -> float:
        """The closed form of a division by the program of a sample on one device, and by what other microbatches of as
        many tensor ranks send. Less where microbatches are so few that closed forms are unsure."""
        every, samples = self._on_one_device(layout.microbatch)
        known, sent = self.programs.any_of(layout.tensor), 0.0
        if known is not None:
            sent = known[1].costs(self._devices).totals.sending * layout.microbatch / known[0]

        def shared(totals: Totals) -> Totals:
            own = totals.shared(layout.tensor, layout.microbatch // samples)
            return replace(own, seconds=own.seconds + sent)

        closed = self._closed(map(shared, self._until_one_fits(every, shared, layout)), layout)
        return UNSURE_OF_FEW * closed if self._has_few(layout) else closed

    def _on_one_device(self, samples: int) -> tuple[Iterator[Totals], int]:
        """The program of a microbatch of ``samples`` on one device, or of one sample if that tells what more take."""
        first = next(self._totals_alone(1), None)
        if first is None or first.launching <= LAUNCHES_COUNT * first.seconds:
            samples = 1
        return self._totals_alone(samples), samples

    def _totals_alone(self, samples: int) -> Iterator[Totals]:
        return (placed.costs(self._devices).totals for placed in self.programs.placed(1, samples))

    def _together(self, layout: Layout) -> float:  # By the program of the tensor ranks.
        return self._closed([placed.costs(layout.data).totals for placed in self._useful(layout)], layout)

    def _closed(self, every: Iterable[Totals], layout: Layout) -> float:
        kinds = (self.forms.kinds(totals, *self._division(layout)) for totals in every)
        return min((seconds for each in kinds for seconds, _ in each), default=math.inf)

    @cached_property
    def forms(self) -> ClosedForms:
        """Those of the model on one device."""
        return ClosedForms.of(next(self.programs.placed(1, 1)).costs(self._devices))

    @property
    def _devices(self) -> int:
        return math.prod(self.request.mesh)

    def _division(self, layout: Layout) -> tuple[int, int, float]:  # Stages, microbatches, bytes of a device.
        return layout.pipeline, layout.microbatches(self.request.batch), memory_limit_of(self.request)
