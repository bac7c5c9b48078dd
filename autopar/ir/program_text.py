"""The text form of a :class:`~autopar.ir.program.Program`, read and printed as plain data.

    # rank at (0,) of mesh (2,)
    parameter "w" = param "layers.0.weight": f32[4, 8] at (S(0))
    placeholder "x" = input "x": f32[8, 4] at (S(0))
    result "0" = output "0": f32[] at (R)
    refresh(%w):
      return %w
    forward(%w, %x):
      %y = aten.mm.default(%x, %w)  @layers.0
      return %y
    ...

Lines before the first section name the slots, in order; each belongs to one of :data:`GROUPS`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from autopar.errors import GraphError

from .graph_text import CALL, MODULE, parse_args, parse_type, text_lines
from .node import Arg, TensorType, Value
from .placements import Placements, parse_placements, short

# The field of a program -> the word its slots' lines begin with.
GROUPS = {
    "parameters": "parameter",
    "placeholders": "placeholder",
    "results": "result",
    "tangents": "tangent",
    "gradients": "gradient",
}
_HEAD = re.compile(r"^# rank at (\([\d, ]*\)) of mesh (\([\d, ]*\))$")
_SLOT = re.compile(rf'^({"|".join(GROUPS.values())}) ("(?:.*)") = (\w+) ("(?:.*)"): (\w+\[[^\]]*\]) at (\(.*\))$')
_SECTION = re.compile(r"^(\w+)\(((?:%\w+(?:, )?)*)\):$")
_VALUE = re.compile(r"^%(\w+)(?:\.(\d+))?$")


class SlotParts(NamedTuple):
    """The fields of a :class:`~autopar.ir.program.TensorSlot`."""

    name: str
    kind: str
    target: str
    shape: tuple[int, ...]
    placements: Placements
    dtype: torch.dtype


class InstructionParts(NamedTuple):
    """The fields of an :class:`~autopar.ir.program.Instruction`."""

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: int
    module: str


class SectionParts(NamedTuple):
    """The fields of a :class:`~autopar.ir.program.Section`."""

    name: str
    inputs: tuple[str, ...]
    instructions: tuple[InstructionParts, ...]
    outputs: tuple[Value | None, ...]


class ProgramParts(NamedTuple):
    """The fields of a :class:`~autopar.ir.program.Program`, slots by the name of their field."""

    coordinate: tuple[int, ...]
    mesh: tuple[int, ...]
    slots: dict[str, tuple[SlotParts, ...]]
    sections: tuple[SectionParts, ...]


def print_slot(group: str, slot: Any) -> str:
    """The line of a :class:`~autopar.ir.program.TensorSlot` of the field ``group``."""
    kind = TensorType(slot.shape, slot.dtype)
    name, target = json.dumps(slot.name), json.dumps(slot.target)
    return f"{GROUPS[group]} {name} = {slot.kind} {target}: {kind} at {short(slot.placements)}"


def parse_program(text: str) -> ProgramParts:
    """The parts of the program that ``text`` shows. Raises :class:`GraphError` naming the line."""
    lines = text_lines(text)
    head = _HEAD.match(lines[0]) if lines else None
    if head is None:
        raise GraphError('a program starts with a line such as "# rank at (0,) of mesh (2,)"')
    count = next((at for at, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    slots: dict[str, tuple[SlotParts, ...]] = dict.fromkeys(GROUPS, ())
    for line in lines[1:count]:
        group, slot = _parse_slot(line)
        slots[group] = (*slots[group], slot)
    return ProgramParts(ast.literal_eval(head[1]), ast.literal_eval(head[2]), slots, parse_sections(lines[count:]))


def parse_sections(lines: list[str]) -> tuple[SectionParts, ...]:
    """The sections that stripped ``lines`` show one after the other. Raises :class:`GraphError` naming the
    line."""
    starts = [at for at, line in enumerate(lines) if _SECTION.match(line)]
    if lines and (not starts or starts[0]):
        raise GraphError(f"no section begins with the line {lines[0]!r}; one does as in forward(%x, %y):")
    return tuple(_parse_section(lines[a:b]) for a, b in pairwise([*starts, len(lines)]))


def _parse_slot(line: str) -> tuple[str, SlotParts]:
    match = _SLOT.match(line)
    if match is None:
        raise GraphError(f"cannot read the line {line!r}")
    kind = parse_type(match[5], {})
    assert kind is not None
    group = next(group for group, word in GROUPS.items() if word == match[1])
    shape = tuple(int(size) for size in kind.shape)
    target = json.loads(match[4])
    return group, SlotParts(json.loads(match[2]), match[3], target, shape, parse_placements(match[6]), kind.dtype)


def _parse_section(lines: list[str]) -> SectionParts:
    head = _SECTION.match(lines[0])
    assert head is not None
    if len(lines) == 1 or not re.match(r"^return( |$)", lines[-1]):
        raise GraphError(f"section {head[1]} does not end with a return, but with {lines[-1]!r}")
    inputs = tuple(word.removeprefix("%") for word in head[2].split(", ") if word)
    outputs = tuple(_parse_values(lines[-1].removeprefix("return").strip()))
    return SectionParts(head[1], inputs, tuple(map(_parse_instruction, lines[1:-1])), outputs)


def _parse_values(text: str) -> Iterator[Value | None]:
    for word in text.split(", ") if text else ():
        match = _VALUE.match(word)
        if match is None and word != "none":
            raise GraphError(f"{word!r} is not a value; write %name, %name.1 or none")
        yield None if match is None else Value(match[1], int(match[2] or 0))


def _parse_instruction(line: str) -> InstructionParts:
    module = MODULE.search(line)
    match = CALL.match(MODULE.sub("", line))
    if match is None:
        raise GraphError(f"cannot read the line {line!r}")
    results = [value for value in _parse_values(match["results"]) if value is not None]
    args, kwargs = parse_args(match["args"], {})
    return InstructionParts(results[0].node, match["op"], args, kwargs, len(results), module[1] if module else "")
