"""The text form of a :class:`~autopar.ir.program.Program`, read and printed as plain data.
The programs of chunks and pipelines consist of such lines too.

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

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from autopar.errors import GraphError, OptionsError
from autopar.field_text import in_sentence

from .graph_text import CALL, parse_args, parse_type, text_lines
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
SECTIONS = ("refresh", "forward", "backward")
_HEAD = re.compile(r"^# rank at (\([\d, ]*\)) of mesh (\([\d, ]*\))$")
_SLOT = re.compile(r'^(\w+) ("(?:.*)") = (\w+) ("(?:.*)"): (\w+\[[^\]]*\]) at (\((?:[^()]|\([^()]*\))*\))(?: (.+))?$')
_SLOT_EXAMPLE = 'parameter "w" = param "layers.0.weight": f32[4, 8] at (S(0))'
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


class SlotLine(NamedTuple):
    """A line that names a slot: the word it begins with, the slot, and what the line says after its placements."""

    word: str
    slot: SlotParts
    tail: str


class Body(NamedTuple):
    """What follows the first line of a program: the lines of each field of slots, and its sections by name."""

    slots: dict[str, tuple[SlotLine, ...]]
    sections: dict[str, SectionParts]


class ProgramParts(NamedTuple):
    """The fields of a :class:`~autopar.ir.program.Program`, slots by the name of their field."""

    coordinate: tuple[int, ...]
    mesh: tuple[int, ...]
    slots: dict[str, tuple[SlotParts, ...]]
    sections: dict[str, SectionParts]


def print_slot(word: str, slot: Any, tail: str = "") -> str:
    """The line of a :class:`~autopar.ir.program.TensorSlot` that begins with ``word`` and ends with ``tail``."""
    kind = TensorType(slot.shape, slot.dtype)
    name, target = json.dumps(slot.name), json.dumps(slot.target)
    return f"{word} {name} = {slot.kind} {target}: {kind} at {short(slot.placements)} {tail}".rstrip()


def parse_program(text: str) -> ProgramParts:
    """The parts of the program that ``text`` shows. Raises :class:`GraphError` naming the line."""
    lines = text_lines(text)
    head = _HEAD.match(lines[0]) if lines else None
    if head is None:
        raise GraphError('a program starts with a line such as "# rank at (0,) of mesh (2,)"')
    body = parse_body("a program", lines[1:], GROUPS, SECTIONS)
    slots = {field: tuple(map(slot_alone, lines)) for field, lines in body.slots.items()}
    return ProgramParts(parse_integers(head[1]), parse_integers(head[2]), slots, body.sections)


def parse_body(what: str, lines: list[str], groups: Mapping[str, str], names: tuple[str, ...]) -> Body:
    """Stripped ``lines`` of slots, each beginning with a word of ``groups`` (field -> word), then the sections
    ``names``, in this order. ``what`` the lines are of is said in errors. Raises :class:`GraphError` naming the
    line."""
    count = next((at for at, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    slots = tuple(map(parse_slot, lines[:count]))
    for line, slot in zip(lines, slots, strict=False):
        if slot.word not in groups.values():
            raise GraphError(f"{what} has no {slot.word!r}, only {', '.join(groups.values())}: {line!r}")
    sections = parse_sections(lines[count:])
    if tuple(section.name for section in sections) != names:
        present = ", ".join(section.name for section in sections) or "none"
        raise GraphError(f"{what} has the sections {in_sentence(names)}, in this order; found: {present}")
    by_field = {field: tuple(slot for slot in slots if slot.word == word) for field, word in groups.items()}
    return Body(by_field, {section.name: section for section in sections})


def parse_sections(lines: list[str]) -> tuple[SectionParts, ...]:
    """The sections that stripped ``lines`` show one after the other. Raises :class:`GraphError` naming the
    line."""
    starts = [at for at, line in enumerate(lines) if _SECTION.match(line)]
    if lines and (not starts or starts[0]):
        raise GraphError(f"no section begins with the line {lines[0]!r}; one does as in forward(%x, %y):")
    return tuple(_parse_section(lines[a:b]) for a, b in pairwise([*starts, len(lines)]))


def parse_integers(text: str) -> tuple[int, ...]:
    """The whole numbers in ``text``, such as ``(0, 1)``."""
    return tuple(map(int, re.findall(r"\d+", text)))


def parse_slot(line: str) -> SlotLine:
    """What :func:`print_slot` printed. Raises :class:`GraphError` naming the line."""
    match = _SLOT.match(line)
    if match is None:
        raise GraphError(f"cannot read the line {line!r}; a slot is written as in {_SLOT_EXAMPLE}")
    try:
        name, target, placements = json.loads(match[2]), json.loads(match[4]), parse_placements(match[6])
    except (ValueError, OptionsError) as error:
        raise GraphError(f"cannot read the line {line!r}: {error}") from error
    kind = parse_type(match[5], {})
    assert kind is not None
    shape = tuple(int(size) for size in kind.shape)
    return SlotLine(match[1], SlotParts(name, match[3], target, shape, placements, kind.dtype), match[7] or "")


def slot_alone(line: SlotLine) -> SlotParts:
    """The slot of a line that says nothing after its placements. Raises :class:`GraphError` if it does."""
    if line.tail:
        raise GraphError(f"the line of {line.word} {line.slot.name!r} ends with its placements, not with {line.tail!r}")
    return line.slot


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
    match = CALL.match(line)
    if match is None:
        raise GraphError(f"cannot read the line {line!r}")
    results = [value for value in _parse_values(match["results"]) if value is not None]
    args, kwargs = parse_args(match["args"], {})
    return InstructionParts(results[0].node, match["op"], args, kwargs, len(results), match["module"] or "")
