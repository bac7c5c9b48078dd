"""The dependencies between the computations of a pipeline, and the edges on which values are sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .actions import Action, Edge, Kind, Message
from .schedule import Schedule

_AFTER: dict[Kind, Kind] = {
    "input_gradient": "forward",
    "backward": "forward",
    "weight_gradient": "input_gradient",
}


@dataclass(frozen=True)
class Wiring:
    """The edges between chunks, and the ranks of the chunks. A message between chunks of one rank needs no action: it
    arrives when its sender has computed it."""

    placement: tuple[int, ...]
    edges: tuple[Edge, ...]

    @staticmethod
    def of(schedule: Schedule) -> Wiring:
        return Wiring(schedule.placement, schedule.edges)

    @cached_property
    def values_from(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk, the chunks whose values it uses."""
        return self._per_chunk((e.target, e.source) for e in self.edges)

    @cached_property
    def values_to(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk, the chunks that use its values."""
        return self._per_chunk((e.source, e.target) for e in self.edges)

    @cached_property
    def gradients_from(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk, the chunks that send it a gradient."""
        return self._per_chunk((e.source, e.target) for e in self.edges if e.gradient)

    @cached_property
    def gradients_to(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk, the chunks to which it sends a gradient."""
        return self._per_chunk((e.target, e.source) for e in self.edges if e.gradient)

    def _per_chunk(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        neighbours: list[list[int]] = [[] for _ in self.placement]
        for chunk, other in pairs:
            neighbours[chunk].append(other)
        return tuple(tuple(sorted(others)) for others in neighbours)

    def arrivals(self, action: Action) -> tuple[Message, ...]:
        """The messages that must have arrived before ``action`` can compute."""
        chunk, microbatch = action.chunk, action.microbatch
        if action.kind == "forward":
            return tuple(Message("forward", source, chunk, microbatch) for source in self.values_from[chunk])
        if action.kind in ("input_gradient", "backward"):
            return tuple(Message("backward", target, chunk, microbatch) for target in self.gradients_from[chunk])
        return ()

    def departures(self, action: Action) -> tuple[Message, ...]:
        """The messages that can be sent once ``action`` has computed."""
        chunk, microbatch = action.chunk, action.microbatch
        if action.kind == "forward":
            return tuple(Message("forward", chunk, target, microbatch) for target in self.values_to[chunk])
        if action.kind in ("input_gradient", "backward"):
            return tuple(Message("backward", chunk, source, microbatch) for source in self.gradients_to[chunk])
        return ()

    def crosses(self, message: Message) -> bool:
        """Whether ``message`` is sent between ranks."""
        return self.placement[message.source] != self.placement[message.target]


def prerequisites(action: Action) -> tuple[Action, ...]:
    """The computations of the same chunk and microbatch that must come before ``action``."""
    before = _AFTER.get(action.kind)
    return () if before is None else (Action(before, action.chunk, action.microbatch),)


def producers(message: Message) -> tuple[Action, Action]:
    """The two actions that may compute the value of ``message``: forward twice, or the two forms of backward."""
    kinds: tuple[Kind, Kind] = ("forward", "forward")
    if message.direction == "backward":
        kinds = ("input_gradient", "backward")
    first, second = (Action(kind, message.source, message.microbatch) for kind in kinds)
    return first, second


def send_of(message: Message) -> Action:
    """The action that sends ``message``."""
    kind: Kind = "send_forward" if message.direction == "forward" else "send_backward"
    return Action(kind, message.source, message.microbatch, message.target)


def receive_of(message: Message) -> Action:
    """The action that receives ``message``."""
    kind: Kind = "receive_forward" if message.direction == "forward" else "receive_backward"
    return Action(kind, message.target, message.microbatch, message.source)
