"""The timeline of a simulated step, and the bytes that each rank holds during it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.schedule.actions import Action, Message
from autopar.schedule.dependencies import Wiring, send_of
from autopar.schedule.schedule import Schedule
from autopar.schedule.timeline import Span, Timeline

from .prices import EdgePrice, PipelinePrices

Memory = tuple[tuple[tuple[float, float], ...], ...]
_FREE = EdgePrice()


class Ran(NamedTuple):
    """An action of ``rank`` and when it ran."""

    rank: int
    action: Action
    start: float
    end: float


class SentMessage(NamedTuple):
    """A message, the time when its receive was posted, and the start and end of its transfer."""

    message: Message
    posted: float
    start: float
    end: float


@dataclass(frozen=True)
class Record:
    """Everything that happened in a step."""

    schedule: Schedule
    prices: PipelinePrices
    ran: tuple[Ran, ...]
    messages: tuple[SentMessage, ...]

    @cached_property
    def ran_by_rank(self) -> tuple[tuple[Ran, ...], ...]:
        """``ran`` by rank, in order of time."""
        own: list[list[Ran]] = [[] for _ in self.schedule.ranks]
        for ran in self.ran:
            own[ran.rank].append(ran)
        return tuple(map(tuple, own))


def timeline_of(record: Record, memory: Memory) -> Timeline:
    """The timeline: computations, reductions and messages (on their sender), in order of time."""
    placement = record.schedule.placement
    spans = [
        Span(rank, str(i), i.kind, start, end, "communication" if i.kind == "reduce" else "compute")
        for rank, i, start, end in record.ran
    ]
    for message, _, start, end in record.messages:
        send = send_of(message)
        spans.append(Span(placement[message.source], str(send), send.kind, start, end, "communication"))
    spans.sort(key=lambda span: (span.start, span.rank, span.end))
    return Timeline(record.schedule.stages, tuple(spans), memory, record.schedule.name)


def memory_of(record: Record) -> Memory:
    """For each rank, (seconds, bytes held from then on): the bytes of chunks, and the buffers of messages at both
    ends."""
    changes: list[list[tuple[float, float]]] = [[] for _ in record.schedule.ranks]
    for chunk, rank in enumerate(record.schedule.placement):
        changes[rank].append((0.0, record.prices.chunks[chunk].static))
    for rank, action, start, end in record.ran:
        if action.microbatch >= 0:
            changes[rank] += _held(record.prices, action, start, end, record.schedule.training)
    for rank, time, change in _buffers(record):
        changes[rank].append((time, change))
    return tuple(map(_accumulate, changes))


def _held(
    prices: PipelinePrices, action: Action, start: float, end: float, training: bool
) -> list[tuple[float, float]]:
    price = prices.chunks[action.chunk]
    first, second, between = price.until_input_gradient, price.until_weight_gradient, price.between_gradients
    if action.kind == "forward":
        taken = [(start, first + second)]
        return taken if training else [*taken, (end, -first - second)]
    if action.kind == "input_gradient":
        return [(start, between), (end, -first)]
    if action.kind == "weight_gradient":
        return [(end, -second - between)]
    return [(start, between), (end, -first - second - between)]


def _buffers(record: Record) -> Iterator[tuple[int, float, float]]:
    """Yields (rank, seconds, change in bytes) for message buffers. A sender keeps a value until it has arrived. A
    receiver has a buffer from when it posts the receive until the value is used; then it counts as part of the
    chunk."""
    begun, ended = {}, {}
    wiring = Wiring.of(record.schedule)
    for _, action, start, end in record.ran:
        if action.microbatch >= 0:
            begun.update(dict.fromkeys(wiring.arrivals(action), start))
            ended.update(dict.fromkeys(wiring.departures(action), end))
    for message, posted, _, arrived in record.messages:
        edge = message[1:3] if message.direction == "forward" else message[2:0:-1]
        nbytes = record.prices.edges.get((edge[0], edge[1]), _FREE).bytes_of(message.direction)
        if nbytes:
            source, target = record.schedule.placement[message.source], record.schedule.placement[message.target]
            yield from ((source, ended[message], nbytes), (source, arrived, -nbytes))
            yield from ((target, posted, nbytes), (target, begun[message], -nbytes))


def _accumulate(changes: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Running totals. At equal times, memory is freed first."""
    levels: list[tuple[float, float]] = []
    held = 0.0
    for time, change in sorted(change_at for change_at in changes if change_at[1] or not change_at[0]):
        held += change
        if levels and levels[-1][0] == time:
            levels.pop()
        levels.append((time, held))
    return tuple(levels)
