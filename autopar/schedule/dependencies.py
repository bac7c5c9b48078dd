"""What the computations of a pipeline need from each other, and on which edge it is sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .instructions import Edge, Instruction, Kind, Message
from .schedule import Schedule

_AFTER: dict[Kind, Kind] = {
    "input_gradient": "forward",
    "backward": "forward",
    "weight_gradient": "input_gradient",
}


@dataclass(frozen=True)
class Wiring:
    """The edges between chunks and where the chunks lie. A message between chunks of one rank is a hand-over: it
    arrives when its sender has computed it, and no instruction names it."""

    placement: tuple[int, ...]
    edges: tuple[Edge, ...]

    @staticmethod
    def of(schedule: Schedule) -> Wiring:
        return Wiring(schedule.placement, schedule.edges)

    @cached_property
    def values_from(self) -> tuple[tuple[int, ...], ...]:
        """Per chunk, the chunks whose values it uses."""
        return self._per_chunk((e.target, e.source) for e in self.edges)

    @cached_property
    def values_to(self) -> tuple[tuple[int, ...], ...]:
        """Per chunk, the chunks that use its values."""
        return self._per_chunk((e.source, e.target) for e in self.edges)

    @cached_property
    def gradients_from(self) -> tuple[tuple[int, ...], ...]:
        """Per chunk, the chunks that send it a gradient."""
        return self._per_chunk((e.source, e.target) for e in self.edges if e.gradient)

    @cached_property
    def gradients_to(self) -> tuple[tuple[int, ...], ...]:
        """Per chunk, the chunks it sends a gradient to."""
        return self._per_chunk((e.target, e.source) for e in self.edges if e.gradient)

    def _per_chunk(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.placement]
        for chunk, other in pairs:
            found[chunk].append(other)
        return tuple(tuple(sorted(others)) for others in found)

    def arrivals(self, instruction: Instruction) -> tuple[Message, ...]:
        """What must have arrived before ``instruction`` can compute."""
        chunk, microbatch = instruction.chunk, instruction.microbatch
        if instruction.kind == "forward":
            return tuple(Message("forward", source, chunk, microbatch) for source in self.values_from[chunk])
        if instruction.kind in ("input_gradient", "backward"):
            return tuple(Message("backward", target, chunk, microbatch) for target in self.gradients_from[chunk])
        return ()

    def departures(self, instruction: Instruction) -> tuple[Message, ...]:
        """What can leave once ``instruction`` has computed."""
        chunk, microbatch = instruction.chunk, instruction.microbatch
        if instruction.kind == "forward":
            return tuple(Message("forward", chunk, target, microbatch) for target in self.values_to[chunk])
        if instruction.kind in ("input_gradient", "backward"):
            return tuple(Message("backward", chunk, source, microbatch) for source in self.gradients_to[chunk])
        return ()

    def crosses(self, message: Message) -> bool:
        """Whether ``message`` is sent between ranks."""
        return self.placement[message.source] != self.placement[message.target]


def prerequisites(instruction: Instruction) -> tuple[Instruction, ...]:
    """What the same chunk must have computed for the same microbatch before."""
    before = _AFTER.get(instruction.kind)
    return () if before is None else (Instruction(before, instruction.chunk, instruction.microbatch),)


def producers(message: Message) -> tuple[Instruction, Instruction]:
    """The instructions either of which computes what ``message`` carries: forward twice, or the two forms of
    backward."""
    kinds: tuple[Kind, Kind] = ("forward", "forward")
    if message.direction == "backward":
        kinds = ("input_gradient", "backward")
    first, second = (Instruction(kind, message.source, message.microbatch) for kind in kinds)
    return first, second


def send_of(message: Message) -> Instruction:
    """The instruction that sends ``message``."""
    kind: Kind = "send_forward" if message.direction == "forward" else "send_backward"
    return Instruction(kind, message.source, message.microbatch, message.target)


def receive_of(message: Message) -> Instruction:
    """The instruction that receives ``message``."""
    kind: Kind = "receive_forward" if message.direction == "forward" else "receive_backward"
    return Instruction(kind, message.target, message.microbatch, message.source)
