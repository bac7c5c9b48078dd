"""The order of a pipeline's computations as a scheduling problem for CP-SAT.

Let x be a computation of a chunk c and a microbatch b: forward (F), input gradient (I), weight gradient (W). Minimise
the makespan T over integer starts s(x), with d(x) the duration in ticks and t(m) the ticks that a message m is sent:

    s(F_eb) >= s(F_cb) + d(F_c) + t(m)      for every edge c -> e                    (values)
    s(I_cb) >= s(I_eb) + d(I_e) + t(m)      for every edge c -> e with gradient      (gradients)
    s(I_cb) >= s(F_cb) + d(F_c),  s(W_cb) >= s(I_cb) + d(I_c)                        (halves)
    x, y of one rank do not overlap                                                  (ranks)
    m, n of one link do not overlap         where messages can meet                  (links)
    what a rank holds never exceeds its limit                                        (memory)
    s(x_c,b+1) >= s(x_cb) + d(x_c)          microbatches are alike                   (symmetry)
    s(F_c,b+k) >= s(W_cb) + d(W_c)          if there is room for k microbatches      (turns)
    T >= s(W_cb) + d(W_c) + the part of reduce(c) that does not overlap it,  T >= a bound known beforehand

**Invariant: the simulated step of every schedule takes at least the optimum of this program**, so that CP-SAT's bound
is a bound in seconds. For this, ticks, bytes and limits are rounded down; the two halves take no longer than a whole
backward; messages need no posted receive and hold no memory. (symmetry) excludes no optimum: exchanging the names of
microbatches so that each chunk computes them in turn changes neither times nor memory. (turns), stated for each of the
three amounts below, follows from (memory) and (symmetry) and strengthens the bound where memory is tight.

Memory is counted as in :class:`~autopar.cost.pipeline.prices.ChunkPrice`: one amount is held from F to the end of I,
one from F to the end of W, one from I to the end of W.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices
from autopar.cost.pipeline.simulate import simulate
from autopar.schedule.actions import Action, Kind, Message
from autopar.schedule.dependencies import Wiring, prerequisites, producers
from autopar.schedule.messages import Orders
from autopar.schedule.schedule import Schedule, held_chunks

from .schedule_size import SPLIT

Limits = tuple[float, ...] | None
# Chosen: rounding to them loses about 0.2% of a step (OPTIMAL of schedule_solver.py), and larger integers slow CP-SAT.
TICKS = 1000  # of the longest computation
# Chosen: a millionth of a limit is less than any tensor of note.
UNITS = 1e6  # of a memory limit
# Chosen: deterministic time is about seconds of one core, so only a machine that is this busy meets the guard.
GUARD = 60.0  # seconds by the clock for each deterministic one


def whole_bytes(prices: PipelinePrices, chunk: int) -> float:
    """The most bytes that a chunk holds of one microbatch."""
    price = prices.chunks[chunk]
    return price.until_input_gradient + price.until_weight_gradient + price.between_gradients


def occupied_seconds(prices: PipelinePrices, message: Message) -> float:
    """Seconds for which a message between ranks occupies its link."""
    price = prices.edges.get((min(message.source, message.target), max(message.source, message.target)), EdgePrice())
    return price.bytes_of(message.direction) / price.bandwidth


def travel_seconds(prices: PipelinePrices, wiring: Wiring, message: Message) -> float:
    """Seconds from the end of the computation that produces a message to its arrival, if its link is free."""
    if not wiring.crosses(message):
        return 0.0
    price = prices.edges.get((min(message.source, message.target), max(message.source, message.target)), EdgePrice())
    return occupied_seconds(prices, message) + price.latency


class ScheduleProgram:
    """The scheduling program stated in the module docstring."""

    def __init__(self, wiring: Wiring, microbatches: int, prices: PipelinePrices, limits: Limits, bound: float) -> None:
        from ortools.sat.python import cp_model  # Here, since most plans need no solved schedule.

        self.wiring, self.prices, self.microbatches = wiring, prices, microbatches
        longest = max(max(c.forward, c.input_gradient, c.weight_gradient) for c in prices.chunks)
        self.tick = longest / TICKS or 1.0
        self.chunks = range(len(wiring.placement))
        self.held = held_chunks(wiring.placement, max(wiring.placement) + 1)
        self.rounded = PipelinePrices(tuple(map(self._rounded, prices.chunks)))
        self.model = cp_model.CpModel()
        self.horizon = self._horizon()
        self.start = {i: self._time(str(i)) for i in self.computations()}
        self.makespan = self.model.new_int_var(self.ticks(bound - prices.step), self.horizon, "makespan")
        self._order()
        self._exclude()
        if limits is not None:
            self._remember(limits)
        self.model.minimize(self.makespan)

    def computations(self) -> Iterator[Action]:
        for chunk in self.chunks:
            for microbatch in range(self.microbatches):
                yield from (Action(kind, chunk, microbatch) for kind in SPLIT)

    def ticks(self, seconds: float) -> int:
        return max(0, math.floor(seconds / self.tick))

    def _rounded(self, price: ChunkPrice) -> ChunkPrice:
        first = min(price.input_gradient, price.whole_backward)
        second = min(price.weight_gradient, price.whole_backward - first)
        return ChunkPrice(self.ticks(price.forward), self.ticks(first), self.ticks(second))

    def _time(self, name: str) -> Any:
        return self.model.new_int_var(0, self.horizon, name)

    def _horizon(self) -> int:
        """Ticks that suffice for every schedule: all computations and messages one after the other."""
        wire = sum(travel_seconds(self.prices, self.wiring, m) for i in self.computations() for m in self.messages(i))
        work = sum(self.rounded.duration(i) for i in self.computations())
        return int(work) + self.ticks(wire + sum(c.reduce for c in self.prices.chunks)) + 1

    def messages(self, action: Action) -> tuple[Message, ...]:
        return self.wiring.arrivals(action)

    def _length(self, action: Action) -> int:
        return int(self.rounded.duration(action))

    def _end(self, action: Action) -> Any:
        return self.start[action] + self._length(action)

    def _left_to_reduce(self, chunk: int) -> float:
        """The least seconds that reductions take after the last weight gradient of a chunk, whether backward is split
        or not."""
        kinds: tuple[Kind, ...] = ("weight_gradient", "backward")
        most = max(self.prices.overlapped_reduction(Action(kind, chunk, 0)) for kind in kinds)
        return self.prices.chunks[chunk].reduce - most

    def _order(self) -> None:
        """Adds (values), (gradients), (halves), (symmetry), and the makespan."""
        for action, start in self.start.items():
            left = self._left_to_reduce(action.chunk) if action.kind == "weight_gradient" else 0.0
            self.model.add(self.makespan >= self._end(action) + self.ticks(left))
            for before in prerequisites(action):
                self.model.add(start >= self._end(before))
            for message in self.messages(action):
                ticks = self.ticks(travel_seconds(self.prices, self.wiring, message))
                self.model.add(start >= self._end(producers(message)[0]) + ticks)
            after = replace(action, microbatch=action.microbatch + 1)
            if after in self.start:
                self.model.add(self.start[after] >= self._end(action))

    def _exclude(self) -> None:
        """Adds (ranks) and (links)."""
        for held in self.held:
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(start, self._length(i), f"run {i}")
                for i, start in self.start.items()
                if i.chunk in held
            )
        for messages in self.links().values():
            if self._can_meet(messages):
                self.model.add_no_overlap(map(self._occupation, messages))

    def links(self) -> dict[object, list[tuple[Message, Action]]]:
        """By link, its messages with the computations that wait for them."""
        links: dict[object, list[tuple[Message, Action]]] = defaultdict(list)
        for action in self.start:
            for message in filter(self.wiring.crosses, self.messages(action)):
                ends = self.wiring.placement[message.source], self.wiring.placement[message.target]
                links[self.prices.links.get(ends, ends)].append((message, action))
        return links

    def _can_meet(self, messages: list[tuple[Message, Action]]) -> bool:
        """Whether messages of one link can overlap. They cannot if all come from one chunk's computations of one kind,
        each of which takes longer than its message."""
        kinds = {(m.source, m.target) for m, _ in messages}
        return len(kinds) > 1 or any(
            self.ticks(occupied_seconds(self.prices, m)) > self._length(producers(m)[0]) for m, _ in messages
        )

    def _occupation(self, awaited: tuple[Message, Action]) -> Any:
        """The interval in which a message occupies its link: after it was produced, and a latency before it is used."""
        message, user = awaited
        begin, size = self._time(f"begin {message}"), self.ticks(occupied_seconds(self.prices, message))
        latency = travel_seconds(self.prices, self.wiring, message) - occupied_seconds(self.prices, message)
        self.model.add(begin >= self._end(producers(message)[0]))
        self.model.add(self.start[user] >= begin + size + self.ticks(latency))
        return self.model.new_fixed_size_interval_var(begin, size, f"send {message}")

    def _remember(self, limits: tuple[float, ...]) -> None:
        """Adds (memory)."""
        for rank, limit in enumerate(limits):
            unit = max(1.0, limit / UNITS)
            capacity = math.floor((limit - sum(self.prices.chunks[c].static for c in self.held[rank])) / unit)
            if capacity < 0:
                self.model.add_bool_or([])
                continue
            spans, amounts = [], []
            for chunk in self.held[rank]:
                for nbytes, first, last in self._spans(chunk):
                    amounts.append(math.floor(nbytes / unit))
                    spans.append(self.model.new_interval_var(self.start[first], self._time(""), self._end(last), ""))
                self._take_turns(chunk, capacity, unit)
            if len(spans) > self.microbatches:  # For a single amount of a single chunk, (turns) implies (memory).
                self.model.add_cumulative(spans, amounts, capacity)

    def _take_turns(self, chunk: int, capacity: int, unit: float) -> None:
        """Adds (turns)."""
        price = self.prices.chunks[chunk]
        forward, first, second = SPLIT
        for nbytes, begins, ends in (
            (price.until_input_gradient + price.until_weight_gradient, forward, first),
            (price.until_weight_gradient, forward, second),
            (price.between_gradients, first, second),
        ):
            turns = capacity // max(1, math.floor(nbytes / unit))
            for later in range(max(1, turns), self.microbatches if nbytes else 0):
                ended = Action(ends, chunk, later - turns)
                self.model.add(self.start[Action(begins, chunk, later)] >= self._end(ended))

    def _spans(self, chunk: int) -> Iterator[tuple[float, Action, Action]]:
        """``(bytes, first, last)`` for every microbatch: bytes held from the start of ``first`` to the end of
        ``last``."""
        price = self.prices.chunks[chunk]
        for microbatch in range(self.microbatches):
            forward, first, second = (Action(kind, chunk, microbatch) for kind in SPLIT)
            spans = ((price.until_input_gradient, forward, first), (price.until_weight_gradient, forward, second))
            for nbytes, begin, end in (*spans, (price.between_gradients, first, second)):
                if nbytes:
                    yield nbytes, begin, end

    def hint(self, schedule: Schedule) -> None:
        """Hints the simulated starts of ``schedule`` to the solver. A whole backward is hinted as its two halves."""
        for ran in simulate(schedule, self.prices).record.ran:
            action, start = ran.action, self.ticks(ran.start)
            if action.kind == "backward":
                first, second = (Action(kind, action.chunk, action.microbatch) for kind in SPLIT[1:])
                self.model.add_hint(self.start[first], start)
                self.model.add_hint(self.start[second], start + self._length(first))
            elif action.computes:
                self.model.add_hint(self.start[action], start)

    def _depth(self, action: Action) -> tuple[int, int, int]:
        """A sort key larger than that of every computation that this one depends on."""
        if action.kind == "forward":
            return action.chunk, 0, action.microbatch
        half = int(action.kind == "weight_gradient")
        return 2 * len(self.chunks) - action.chunk, half, action.microbatch

    def solve(self, time_limit: float, seed: int, gap: float) -> tuple[Orders | None, float]:
        """Solves the program. Returns the computations of each rank in the order of their starts, None if none were
        found, and a lower bound of the step in seconds (infinite: nothing fits)."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = time_limit
        # The deterministic clock does not count all work. Only if this limit is reached may solutions differ between
        # runs.
        solver.parameters.max_time_in_seconds = GUARD * time_limit
        solver.parameters.relative_gap_limit = gap / 4
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None, math.inf
        least = max(0.0, solver.best_objective_bound) * self.tick + self.prices.step
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, least
        # Of computations that start together, those that take no ticks come first, in the order of their dependencies.
        at = {i: (solver.value(start), self._length(i) > 0, self._depth(i)) for i, start in self.start.items()}
        orders = tuple(tuple(sorted((i for i in at if i.chunk in held), key=lambda i: at[i])) for held in self.held)
        return orders, least
