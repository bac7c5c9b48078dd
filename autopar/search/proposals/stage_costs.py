"""What the segments of a stage cost, as the program of one microbatch of few layers places them, and unfolded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.planner.alone import seconds_alone
from autopar.planner.mesh_solution import MeshSolution
from autopar.search.schedules.chunks import WirePrice
from autopar.search.schedules.cuts import Segments
from autopar.search.segments import price_segments, seconds_of_microbatch, segment_at
from autopar.search.stage_prices.chunk_price import SECTIONS, sections_of
from autopar.solver.problem import Floats

from .data_ranks import parameter_costs
from .few_layer_step import Microbatch

# The kinds of lines that reduce gradients, and that update parameters.
_ONCE = (("gradient",), ("refresh", "optimizer", "offload"))


@dataclass(frozen=True, slots=True)
class Totals:
    """All layers together: ``seconds`` of one microbatch, of which some are ``launching`` kernels and ``sending``, and
    those ``once`` a step; ``static`` bytes, and those that a microbatch ``saved``."""

    seconds: float
    launching: float
    sending: float
    once: float
    static: float
    saved: float

    def shared(self, ranks: int, samples: int = 1) -> Totals:
        """Of a microbatch of ``samples`` times as many samples, the part of each of so many ranks that share all but
        launches, of which each has as many."""
        each = samples / ranks
        return replace(
            self,
            seconds=each * (self.seconds - self.launching) + self.launching,
            sending=each * self.sending,
            once=self.once / ranks,
            static=self.static / ranks,
            saved=each * self.saved,
        )


@dataclass(frozen=True, eq=False)
class StageCosts:
    """The segments of all layers. ``sections``: the seconds of each for one microbatch; ``reduce``, ``update``: seconds
    once a step; ``weights``: the bytes of its parameters, none of them sharded; ``wire_bytes``: what a device sends of
    the values that cross its start; ``launching``, ``sending``: as of :class:`Totals`."""

    segments: Segments
    sections: Mapping[str, Floats]
    reduce: Floats
    update: Floats
    weights: tuple[tuple[int, ...], ...]
    wire_bytes: Floats
    launching: float
    sending: float

    def over(self, link: WirePrice) -> StageCosts:
        """With messages over ``link``."""
        wire = np.where(np.arange(self.segments.count) > 0, link.latency + self.wire_bytes / link.bandwidth, 0.0)
        return replace(self, segments=replace(self.segments, wire=wire))

    @cached_property
    def totals(self) -> Totals:
        own = self.segments
        parts = own.seconds, self.update, self.reduce, own.static, own.saved
        seconds, update, reduce, static, saved = (float(part.sum()) for part in parts)
        return Totals(seconds, self.launching, self.sending, update + reduce, static, saved)


@dataclass(frozen=True, eq=False)
class PlacedStage:
    """A ``solution`` of the program of ``microbatch``, on the mesh inside a stage without its data ranks, or with
    them (``has_data``). ``of_parameters``: the one whose parameters rest in the same places, if there is another."""

    microbatch: Microbatch
    solution: MeshSolution
    has_data: bool = False
    of_parameters: PlacedStage | None = None
    _of_data: dict[int, StageCosts] = field(default_factory=dict, init=False)

    def costs(self, data: int) -> StageCosts:
        """The costs where so many data ranks have a mesh each."""
        if data not in self._of_data:
            self._of_data[data] = self._costs(data)
        return self._of_data[data]

    @cached_property
    def _sending(self) -> float:
        """Seconds of the messages of one microbatch, in all layers, as if computing hid none."""
        lines = (line for line in self.solution.breakdown.lines if line.kind in ("reshard", "exchange"))
        return float(self._unfolded((line.name, line.seconds / line.times) for line in lines).sum())

    @cached_property
    def _launching(self) -> float:
        """Seconds to launch the kernels of one microbatch, in all layers; what is recomputed is not counted."""
        if self.of_parameters is not None:
            return self.of_parameters._launching
        prices = self.solution.prices
        alone = seconds_alone(prices.cluster, self.solution.instance.graph, prices.fused)
        return float(self._unfolded((name, min(figures)) for name, figures in alone.items()).sum())

    @cached_property
    def _few(self) -> Segments:
        own, solved = self.microbatch, self.solution
        link = WirePrice(0.0, 1.0)
        return price_segments(own.bare, own.candidates, own.segment_of, solved, solved.prices, solved.breakdown, link)

    @cached_property
    def _sections(self) -> Mapping[str, Floats]:
        """Seconds of each segment by section, for one microbatch."""
        graph = self.solution.step.placed.graph
        section_of = sections_of(replace(graph, outputs=(*graph.outputs, *self.microbatch.returned)))
        lines = [(section_of(line), line.name, s) for line, s in seconds_of_microbatch(self.solution.breakdown.lines)]
        return {own: self._unfolded((name, s) for section, name, s in lines if section == own) for own in SECTIONS}

    @cached_property
    def _weights(self) -> tuple[tuple[int, ...], ...]:
        few: list[tuple[int, ...]] = [() for _ in range(self._few.count)]
        for node in self.solution.instance.graph.placeholders("param"):
            few[segment_at(node.name, self.microbatch.segment_of)] += (int(node.type.bytes),)
        return tuple(few[segment] for segment in self.microbatch.unfolded)

    def _costs(self, data: int) -> StageCosts:
        few, every = self._few, list(self.microbatch.unfolded)
        static, reduce, update = self._once(data)
        # Plans choose better what to recompute than these few ways. Chosen: that makes up for messages in flight.
        uncounted = np.zeros(len(every))
        seconds, saved, wire, working, again = (
            part[every] for part in (few.seconds, few.saved, few.wire, few.working, few.again)
        )
        segments = Segments(self.microbatch.starts, seconds, static, saved, wire, uncounted, uncounted, working, again)
        of_microbatch = self._weights, wire, self._launching, self._sending
        return StageCosts(segments, self._sections, reduce, update, *of_microbatch)

    def _once(self, data: int) -> tuple[Floats, Floats, Floats]:
        """By segment: static bytes, and the seconds of reducing gradients and of updates."""
        if self.of_parameters is not None:
            known = self.of_parameters.costs(data)
            return known.segments.static, known.reduce, known.update
        if self.has_data:
            lines = self.solution.breakdown.lines
            reduce, update = (
                self._unfolded((line.name, line.seconds) for line in lines if line.kind in kinds) for kinds in _ONCE
            )
            return self._few.static[list(self.microbatch.unfolded)], reduce, update
        costs = parameter_costs(self.solution, data, self.microbatch.exchanged)
        static, reduce, update = (
            self._unfolded((name, getattr(cost, part)) for name, cost in costs.items())
            for part in ("static", "reduce", "update")
        )
        return static, reduce, update

    def _unfolded(self, named: Iterable[tuple[str, float]]) -> Floats:
        """The sum by segment of figures of nodes or lines of few layers, for all layers."""
        few = np.zeros(self._few.count)
        for name, figure in named:
            few[segment_at(name, self.microbatch.segment_of)] += figure
        return few[list(self.microbatch.unfolded)]
