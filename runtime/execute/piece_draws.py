"""Random draws inside compiled pieces: they take their streams as tensors.

A draw reads the state of the step on the host. ``autopar.streams`` reads it once, at the beginning of a section, and
the draws of :mod:`autopar.ops.random_streams` take what it returns. What differs between the draws of equal layers, or
of ranks with equal shards, is in the streams, so that equal pieces stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.node import Value, fresh_name
from autopar.ir.program import Instruction, Section
from autopar.ops.random import position_strides
from autopar.ops.random_streams import MOST_ITERATIONS, STREAMED, STREAMS


@dataclass(frozen=True)
class _Draw:
    """A draw of a section, and the part of the whole tensor that it draws: its ``first`` element and its loops.
    ``distance``: of the first elements of consecutive pieces of the batch."""

    instruction: Instruction
    place: int
    first: int
    distance: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(instruction: Instruction) -> _Draw:
        options: dict[str, Any] = dict(instruction.kwargs)
        samples = options.get("samples", ())
        counts = tuple(options.get("counts", ()))
        strides = tuple(options.get("strides", ()))
        if not counts:
            counts = tuple(map(int, _size(instruction)))
            strides = position_strides(counts, samples)
        first, distance = options.get("first", 0) if options.get("counts") else 0, samples[1] if samples else 0
        return _Draw(instruction, options.get("place", 0), int(first), int(distance), counts, strides)

    @property
    def state(self) -> Value:
        state = self.instruction.args[0]
        assert isinstance(state, Value)
        return state

    def of_stream(self, stream: Value) -> Instruction:
        options = dict(self.instruction.kwargs)
        loops = {"counts": self.counts, "strides": self.strides}
        kwargs = {"dtype": options["dtype"], "device": options["device"], **loops}
        args = (stream, *self.instruction.args[1:])
        return replace(self.instruction, op=STREAMED[self.instruction.op], args=args, kwargs=tuple(kwargs.items()))


def with_streams(section: Section) -> Section:
    """``section``, whose draws can be compiled; see the module docstring."""
    inputs = {Value(name) for name in section.inputs}
    found = [_Draw.of(i) for i in section.instructions if i.op in STREAMED and i.args[0] in inputs]
    draws = [draw for draw in found if all(count < MOST_ITERATIONS for count in draw.counts)]
    streams = dict(_streams(section, draws))
    replaced = {name: own for stream, each in streams.values() for name, own in each.items()}
    first = tuple(stream for stream, _ in streams.values())
    return replace(section, instructions=(*first, *(replaced.get(i.name, i) for i in section.instructions)))


def _streams(
    section: Section, draws: list[_Draw]
) -> Iterator[tuple[Value, tuple[Instruction, dict[str, Instruction]]]]:
    """By state: the instruction that makes the streams, and the draws that take them, by name."""
    taken = {*section.inputs, *(i.name for i in section.instructions)}
    for state in dict.fromkeys(draw.state for draw in draws):
        own = [draw for draw in draws if draw.state == state]
        name = fresh_name("streams", taken)
        args = (state, *(tuple(getattr(draw, field) for draw in own) for field in ("place", "first", "distance")))
        kwargs = (("device", dict(own[0].instruction.kwargs)["device"]),)
        makes = Instruction(name, STREAMS, args, kwargs, len(own))
        yield state, (makes, {d.instruction.name: d.of_stream(Value(name, i)) for i, d in enumerate(own)})


def _size(instruction: Instruction) -> Any:
    return instruction.args[1] if len(instruction.args) > 1 else dict(instruction.kwargs)["size"]
