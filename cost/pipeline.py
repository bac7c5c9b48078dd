"""Replays a schedule's instruction lists with priced durations: step time, bubble, timeline and memory.

Each rank does its instructions in order. A computation starts when the rank is free and its values have arrived, and
is done once its price has passed. A message travels when its send and its receive are posted (its send, if transports
are buffered) and its link is free, first come first served; it takes the link for bytes / bandwidth and arrives a
latency later. Reductions of a rank run one after the other, and its step follows the last of them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import ScheduleError
from autopar.schedule import Instruction, Message, Schedule
from autopar.schedule_wiring import Wiring
from autopar.timeline import Timeline

from .pipeline_prices import EdgePrice, PipelinePrices
from .pipeline_record import Memory, Ran, Record, Travelled, memory_of, timeline_of

_FREE = EdgePrice()


@dataclass(frozen=True)
class Simulation:
    """A simulated step. ``busy``: seconds that each rank computes (reductions and the step not among them);
    ``computed``: when the last computation ends."""

    seconds: float
    computed: float
    busy: tuple[float, ...]
    record: Record

    @property
    def bubble(self) -> float:
        """Idle over busy time of all ranks while any computes: (p - 1)/m for 1F1B with equal stages."""
        busy = sum(self.busy)
        return (self.computed * len(self.busy) - busy) / busy if busy else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """When each rank did what, and the bytes it held."""
        return timeline_of(self.record, self.memory)

    @cached_property
    def memory(self) -> Memory:
        """Per rank, (seconds, bytes held from then on)."""
        return memory_of(self.record)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most held at any time."""
        return tuple(max(held for _, held in rank) for rank in self.memory)


class _Replay:
    """The event loop. Ranks run ahead as far as what has arrived lets them; then the message that can go first goes."""

    def __init__(self, schedule: Schedule, prices: PipelinePrices) -> None:
        self.schedule, self.prices, self.wiring = schedule, prices, Wiring.of(schedule)
        self.position = [0] * schedule.stages
        self.clock = [0.0] * schedule.stages
        self.reduced = [0.0] * schedule.stages
        self.sent: dict[Message, float] = {}
        self.posted: dict[Message, float] = {}
        self.arrived: dict[Message, float] = {}
        self.waiting: dict[Message, list[int]] = defaultdict(list)
        self.link_free: dict[object, float] = defaultdict(float)
        self.requests: list[tuple[float, int, Message]] = []
        self.done: list[Ran] = []
        self.travelled: list[Travelled] = []

    def run(self) -> None:
        for rank in range(self.schedule.stages):
            self.advance(rank)
        while self.requests:
            time, _, message = heapq.heappop(self.requests)
            self.travel(message, time)
            for rank in self.waiting.pop(message, ()):
                self.advance(rank)
        for rank, listed in enumerate(self.schedule.ranks):
            if self.position[rank] < len(listed):
                at = self.position[rank]
                raise ScheduleError(
                    f"rank {rank} never gets past position {at}, {listed[at]}: check the schedule first"
                )

    def advance(self, rank: int) -> None:
        listed = self.schedule.ranks[rank]
        while self.position[rank] < len(listed):
            instruction = listed[self.position[rank]]
            if instruction.microbatch < 0:
                self.finish(rank, instruction)
            elif instruction.computes:
                if not self.compute(rank, instruction):
                    return
            elif not self.communicate(rank):
                return
            self.position[rank] += 1

    def compute(self, rank: int, instruction: Instruction) -> bool:
        """Whether ``instruction`` could run; if not, ``rank`` waits for one of its values."""
        start = self.clock[rank]
        for message in self.wiring.arrivals(instruction):
            if self.wiring.crosses(message):
                arrival = self.arrived.get(message)
                if arrival is None:
                    self.waiting[message].append(rank)
                    return False
                start = max(start, arrival)
        end = start + self.prices.duration(instruction)
        self.clock[rank] = end
        self.done.append(Ran(rank, instruction, start, end))
        return True

    def finish(self, rank: int, instruction: Instruction) -> None:
        """A reduction, or the step."""
        start = max(self.clock[rank], self.reduced[rank])
        end = start + (self.prices.step if instruction.chunk < 0 else self.prices.chunks[instruction.chunk].reduce)
        if instruction.chunk >= 0:
            self.reduced[rank] = end
        if instruction.chunk < 0 or not self.prices.overlap:
            self.clock[rank] = end
        self.done.append(Ran(rank, instruction, start, end))

    def communicate(self, rank: int) -> bool:
        """Posts the message at hand; without overlap all that follow each other, and waits for them."""
        if self.prices.overlap:
            self.post(rank, self.schedule.ranks[rank][self.position[rank]])
            return True
        listed, start = self.schedule.ranks[rank], self.position[rank]
        end = next((k for k in range(start, len(listed)) if listed[k].peer < 0), len(listed))
        messages = [instruction.message for instruction in listed[start:end]]
        for instruction in listed[start:end]:
            self.post(rank, instruction)
        missing = next((message for message in messages if message not in self.arrived), None)
        if missing is not None:
            self.waiting[missing].append(rank)
            return False
        self.clock[rank] = max(self.clock[rank], *(self.arrived[message] for message in messages))
        self.position[rank] = end - 1
        return True

    def post(self, rank: int, instruction: Instruction) -> None:
        message, ends = instruction.message, self.sent if instruction.sends else self.posted
        if message in ends:
            return
        ends[message] = self.clock[rank]
        if self.prices.buffered and instruction.receives:
            return
        if self.prices.buffered or (message in self.sent and message in self.posted):
            ready = self.sent[message] if self.prices.buffered else max(self.sent[message], self.posted[message])
            heapq.heappush(self.requests, (ready, len(self.sent) + len(self.posted), message))

    def travel(self, message: Message, ready: float) -> None:
        ends = self.wiring.placement[message.source], self.wiring.placement[message.target]
        edge = (message.source, message.target) if message.direction == "forward" else (message.target, message.source)
        price = self.prices.edges.get(edge, _FREE)
        link = self.prices.links.get(ends, ends)
        start = max(ready, self.link_free[link])
        self.link_free[link] = start + price.bytes_of(message.direction) / price.bandwidth
        self.arrived[message] = self.link_free[link] + price.latency
        self.travelled.append(Travelled(message, self.posted.get(message, start), start, self.arrived[message]))


def simulate(schedule: Schedule, prices: PipelinePrices) -> Simulation:
    """Replays ``schedule``. Raises :class:`ScheduleError` if it is not priced, or comes to a stop."""
    prices.check(schedule.chunks)
    replay = _Replay(schedule, prices)
    replay.run()
    busy = [0.0] * schedule.stages
    computed = 0.0
    for ran in replay.done:
        if ran.instruction.microbatch >= 0:
            busy[ran.rank] += ran.end - ran.start
            computed = max(computed, ran.end)
    seconds = max(*replay.clock, *replay.reduced)
    record = Record(schedule, prices, tuple(replay.done), tuple(replay.travelled))
    return Simulation(seconds, computed, tuple(busy), record)
