"""What the segments of a stage cost, as the program of one microbatch of few layers places them, and unfolded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.ir.plan_record import ONCE_A_STEP
from autopar.placement.overlap_windows import hidden_gathers
from autopar.planner.alone import seconds_alone
from autopar.planner.mesh_solution import MeshSolution
from autopar.search.chunk_price import sections_of
from autopar.search.chunks import WirePrice
from autopar.search.schedules.cuts import Segments
from autopar.search.segments import price_segments, segment_at
from autopar.solver.problem import Floats

from .closed_form import Totals
from .data_ranks import ParameterCost, parameter_costs
from .few_layer_step import Microbatch

SECTIONS = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True, eq=False)
class StageCosts:
    """The segments of all layers. ``sections``: the seconds of each for one microbatch; ``reduce``, ``update``: seconds
    once a step; ``weights``: the bytes of its parameters, none of them sharded; ``wire_bytes``: what a device sends of
    the values that cross its start."""

    segments: Segments
    sections: Mapping[str, Floats]
    reduce: Floats
    update: Floats
    weights: tuple[tuple[int, ...], ...]
    wire_bytes: Floats

    def over(self, link: WirePrice) -> StageCosts:
        """With messages over ``link``."""
        wire = np.where(np.arange(self.segments.count) > 0, link.latency + self.wire_bytes / link.bandwidth, 0.0)
        return replace(self, segments=replace(self.segments, wire=wire))


@dataclass(frozen=True, eq=False)
class PlacedStage:
    """A ``solution`` of the program of ``microbatch``, on the mesh inside a stage without its data ranks, or with
    them (``has_data``). ``of_parameters``: the one whose parameters rest in the same places, if there is another."""

    microbatch: Microbatch
    solution: MeshSolution
    has_data: bool = False
    of_parameters: PlacedStage | None = None

    def costs(self, data: int) -> StageCosts:
        """The costs where so many data ranks have a mesh each."""
        if data not in self._of_data:
            self._of_data[data] = self._costs(data)
        return self._of_data[data]

    def totals(self, data: int) -> Totals:
        """All layers together, where so many data ranks have a mesh each."""
        if data not in self._totals:
            costs = self.costs(data)
            own, once = costs.segments, float(costs.update.sum() + costs.reduce.sum())
            sums = (float(part.sum()) for part in (own.static, own.saved))
            self._totals[data] = Totals(float(own.seconds.sum()), self._launching, self._sending, once, *sums)
        return self._totals[data]

    @cached_property
    def _sending(self) -> float:
        """Seconds of the messages of one microbatch, in all layers, as if computing hid none."""
        of, sending = self.microbatch.segment_of, np.zeros(self._few.count)
        for line in self.solution.breakdown.lines:
            if line.kind in ("reshard", "exchange"):
                sending[segment_at(line.name, of)] += line.seconds / line.times
        return float(sending[list(self.microbatch.unfolded)].sum())

    @cached_property
    def _launching(self) -> float:
        """Seconds to launch the kernels of one microbatch, in all layers; what is recomputed is not counted."""
        if self.of_parameters is not None:
            return self.of_parameters._launching
        of, launching, prices = self.microbatch.segment_of, np.zeros(self._few.count), self.solution.prices
        alone = seconds_alone(prices.cluster, self.solution.instance.graph, prices.fused)
        for name, (seconds, launches) in alone.items():
            launching[segment_at(name, of)] += min(seconds, launches)
        return float(launching[list(self.microbatch.unfolded)].sum())

    @cached_property
    def _totals(self) -> dict[int, Totals]:
        return {}

    @cached_property
    def _of_data(self) -> dict[int, StageCosts]:
        return {}

    @cached_property
    def _few(self) -> Segments:
        own, solved = self.microbatch, self.solution
        link = WirePrice(0.0, 1.0)
        return price_segments(own.bare, own.candidates, own.segment_of, solved, solved.prices, solved.breakdown, link)

    @cached_property
    def _sections(self) -> Mapping[str, Floats]:
        """Seconds of each segment of few layers by section, for one microbatch."""
        lines, of = self.solution.breakdown.lines, self.microbatch.segment_of
        section_of, exposed = sections_of(self.solution.step.placed.graph), hidden_gathers(lines)
        found = {name: np.zeros(self._few.count) for name in SECTIONS}
        for line in lines:
            if line.kind not in (*ONCE_A_STEP, "hidden"):
                share = 1.0 - exposed.get(line.phase, 0.0) if line.kind == "weight" else 1.0
                found[section_of(line)][segment_at(line.name, of)] += share * line.seconds / line.times
        return found

    def _costs(self, data: int) -> StageCosts:
        few, own, of = self._few, self.microbatch, self.microbatch.segment_of
        static, reduce, update = self._once(data)
        weights: list[tuple[int, ...]] = [() for _ in range(few.count)]
        for node in self.solution.instance.graph.placeholders("param"):
            weights[segment_at(node.name, of)] += (int(node.type.bytes),)
        every = list(own.unfolded)
        # Plans choose better what to recompute than these few ways. Chosen: that makes up for messages in flight.
        uncounted = np.zeros(len(every))
        seconds, saved, wire, working, again = (
            part[every] for part in (few.seconds, few.saved, few.wire, few.working, few.again)
        )
        segments = Segments(own.starts, seconds, static[every], saved, wire, uncounted, uncounted, working, again)
        return StageCosts(
            segments,
            {name: part[every] for name, part in self._sections.items()},
            reduce[every],
            update[every],
            tuple(weights[segment] for segment in every),
            few.wire[every],
        )

    def parameters(self, data: int) -> Mapping[str, ParameterCost]:
        """What each parameter costs where so many data ranks have a mesh each."""
        if self.of_parameters is not None:
            return self.of_parameters.parameters(data)
        if data not in self._parameters:
            self._parameters[data] = parameter_costs(self.solution, data, self.microbatch.exchanged)
        return self._parameters[data]

    @cached_property
    def _parameters(self) -> dict[int, Mapping[str, ParameterCost]]:
        return {}

    def _once(self, data: int) -> tuple[Floats, Floats, Floats]:
        """By segment of few layers: static bytes, and the seconds of reducing gradients and of updates."""
        of, parts = self.microbatch.segment_of, tuple(np.zeros(self._few.count) for _ in range(3))
        if self.has_data:
            reduce, update = (_seconds_of(self.solution, of, self._few.count, kinds) for kinds in _ONCE)
            return self._few.static, reduce, update
        for name, cost in self.parameters(data).items():
            for part, value in zip(parts, (cost.static, cost.reduce, cost.update), strict=True):
                part[segment_at(name, of)] += value
        return parts[0], parts[1], parts[2]


_ONCE: tuple[Sequence[str], ...] = (("gradient",), ("refresh", "optimizer", "offload"))


def _seconds_of(solution: MeshSolution, segment_of: Mapping[str, int], count: int, kinds: Sequence[str]) -> Floats:
    """By segment, the seconds of the lines of some kinds in a whole step."""
    seconds = np.zeros(count)
    for line in solution.breakdown.lines:
        if line.kind in kinds:
            seconds[segment_at(line.name, segment_of)] += line.seconds
    return seconds
