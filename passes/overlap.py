"""Lets communication run beside computation: starts early, waits late.

A wait moves down to just before the first use of its tensor. The start of a gather of a weight, whose shard is there from the
beginning, moves up to just before the previous such gather is awaited: one weight is on its way while the one before is in
use, so that at most one gathered weight more is in memory. Other collectives start where their operand is made,
which is where lowering puts them.

Invariant: the instructions are the same, each after what it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.graph import Value, values_in
from autopar.program import Instruction, Program, Section

WAIT = "collective.wait"
GATHER = "collective.all_gather"


def overlap(program: Program) -> Program:
    """The program with forward and backward overlapped."""
    return replace(program, forward=overlap_section(program.forward), backward=overlap_section(program.backward))


def overlap_section(section: Section) -> Section:
    """The section with waits sunk and weight gathers prefetched by one."""
    return replace(section, instructions=tuple(_prefetched(section, _with_late_waits(section))))


def _uses(instruction: Instruction) -> set[str]:
    kwargs = tuple(value for _, value in instruction.kwargs)
    return {value.node for value in values_in((*instruction.args, *kwargs))}


def _with_late_waits(section: Section) -> list[Instruction]:
    """Waits held back until something uses what they return; those only returned come last, in order."""
    held: dict[str, Instruction] = {}
    found: list[Instruction] = []
    for instruction in section.instructions:
        for name in sorted(_uses(instruction) & held.keys(), key=list(held).index):
            found.append(held.pop(name))
        if instruction.op == WAIT:
            held[instruction.name] = instruction
        else:
            found.append(instruction)
    return [*found, *held.values()]


def _prefetched(section: Section, instructions: Sequence[Instruction]) -> list[Instruction]:
    """Moves the start of each gather of an input to before the wait for the gather before it."""
    gathers = _input_gathers(section, instructions)
    waits = [i for i in instructions if i.op == WAIT and _operand(i).node in gathers]
    following = dict(zip((w.name for w in waits), waits[1:], strict=False))
    found = [gathers[_operand(waits[0]).node]] if waits else []
    for instruction in instructions:
        if instruction.name in gathers:
            continue
        if instruction.name in following:
            found.append(gathers[_operand(following[instruction.name]).node])
        found.append(instruction)
    return found


def _operand(wait: Instruction) -> Value:
    value = wait.args[0]
    assert isinstance(value, Value)
    return value


def _input_gathers(section: Section, instructions: Sequence[Instruction]) -> dict[str, Instruction]:
    """The gathers that need nothing but inputs of the section, by name."""
    inputs = set(section.inputs)
    return {i.name: i for i in instructions if i.op == GATHER and _uses(i) <= inputs}
