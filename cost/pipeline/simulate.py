"""Replays a schedule's action lists with priced durations, for step time, bubble, timeline and memory.

Each rank runs its actions in order. A computation starts when the rank is free and its values have arrived, and lasts
as long as it is priced; where ranks share processors, less if others of its host wait meanwhile. A message is sent when
its send and its receive are posted (if transports are buffered, its send) and its link is free, first come first
served. It occupies the link for bytes / bandwidth and arrives a latency later. Reductions of a rank run one after the
other. Each starts during the last backward of its chunk, and the rank's step follows the last of them.
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
    """A simulated step. ``busy``: seconds that each rank computes (without reductions and the step); ``computed``: the
    time at which the last computation ends."""

    seconds: float
    computed: float
    busy: tuple[float, ...]
    record: Record

    @property
    def bubble(self) -> float:
        """The ratio of idle to busy time of all ranks until the last computation ends: (p - 1)/m for 1F1B with equal
        stages."""
        busy = sum(self.busy)
        return (self.computed * len(self.busy) - busy) / busy if busy else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The actions of each rank with their times, and the bytes that it held."""
        return timeline_of(self.record, self.memory)

    @cached_property
    def memory(self) -> Memory:
        """For each rank, (seconds, bytes held from then on)."""
        return memory_of(self.record)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """For each rank, the most bytes held at any time."""
        return tuple(max(held for _, held in rank) for rank in self.memory)


def simulate(schedule: Schedule, prices: PipelinePrices) -> Simulation:
    """Replays ``schedule``. Raises :class:`ScheduleError` if prices are missing or invalid, or if it cannot run to its
    end."""
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
    record = Record(schedule, prices, tuple(replay.done), tuple(replay.messages))
    return Simulation(seconds, computed, tuple(busy), record)
