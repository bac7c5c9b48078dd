"""Replays a schedule's action lists with priced durations: step time, bubble, timeline and memory.

Each rank does its actions in order. A computation starts when the rank is free and its values have arrived, and
is done once its price has passed; where ranks share processors, sooner if others of its host wait meanwhile. A message
is sent when its send and its receive are posted (its send, if transports are buffered) and its link is free, first come
first served; it takes the link for bytes / bandwidth and arrives a latency later. Reductions of a rank run one after
the other, each from within the last backward of its chunk, and its step follows the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autopar.schedule.schedule import Schedule
from autopar.schedule.timeline import Timeline

from .event_loop import Replay
from .prices import PipelinePrices
from .record import Memory, Record, memory_of, timeline_of


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


def simulate(schedule: Schedule, prices: PipelinePrices) -> Simulation:
    """Replays ``schedule``. Raises :class:`ScheduleError` if it is not priced, or comes to a stop."""
    prices.check(schedule.chunks)
    replay = Replay(schedule, prices)
    replay.run()
    busy = [0.0] * schedule.stages
    computed = 0.0
    for ran in replay.done:
        if ran.action.microbatch >= 0:
            busy[ran.rank] += ran.end - ran.start
            computed = max(computed, ran.end)
    seconds = max((ran.end for ran in replay.done), default=0.0)
    record = Record(schedule, prices, tuple(replay.done), tuple(replay.travelled))
    return Simulation(seconds, computed, tuple(busy), record)
