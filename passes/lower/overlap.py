"""Overlaps communication with computation: starts collectives early and waits for them late.

- A collective that depends only on the batch (such as the number of valid labels) starts before everything else. - A
wait moves down to just before the first use of its tensor. If only a model output waits, such as the reduced loss of
  a step, the caller waits instead, so that ranks need not synchronise in the middle of a step.
- The fetch of a saved activation from host memory starts just before the wait for the previous one, too.
- The gather of a weight, or of a message of several, whose shards exist from the beginning, starts just before the wait
  for the previous such gather: one is in flight while the one before is used, so at most one more is in memory.

Other collectives start where their operand is computed, where lowering puts them.

Invariant: the instructions are the same except for dropped waits, and each comes after its operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.node import Value
from autopar.ir.program import COLLECTIVES, Instruction, Program, Section, is_random

WAIT = "collective.wait"
GATHERS, FETCHES = ("collective.all_gather", "collective.all_gather_bucket"), ("host.fetch",)
STARTS = tuple(f"collective.{kind}" for kind in COLLECTIVES)
# Instructions that run early delay the first layer, so they must be few.
# Chosen: the count of labels of a shifted loss takes fewer operations.
LONGEST_EARLY_CHAIN = 12


def overlap(program: Program) -> Program:
    """The program with forward and backward overlapped; a model output may be a handle still to be awaited."""
    data = {slot.name for slot in program.placeholders if slot.kind in ("input", "constant")}
    count = sum(slot.kind == "output" for slot in program.results)
    outputs = len(program.results) if count == len(program.results) else 0
    forward = overlap_section(_with_early_starts(program.forward, data))
    return replace(program, forward=_without_last_waits(forward, outputs), backward=overlap_section(program.backward))


def overlap_section(section: Section) -> Section:
    """The section with late waits, and with weight gathers prefetched by one."""
    instructions = _prefetched(section, _with_late_waits(section), GATHERS)
    return replace(section, instructions=tuple(_prefetched(section, instructions, FETCHES)))


def _with_early_starts(section: Section, data: set[str]) -> Section:
    """The section with collectives that need only ``data`` first, together with the instructions they need."""
    chains: dict[str, set[str]] = {name: set() for name in data}
    first: set[str] = set()
    for instruction in section.instructions:
        needs = [chains.get(value.node) for value in instruction.operands]
        from_data = [chain for chain in needs if chain is not None]
        if len(from_data) < len(needs) or is_random(instruction.op):
            continue  # Most are of weights.
        chain = chains[instruction.name] = {instruction.name}.union(*from_data)
        if needs and instruction.op in STARTS and len(chain) <= LONGEST_EARLY_CHAIN:
            first |= chain
    early = [i for i in section.instructions if i.name in first]
    return replace(section, instructions=(*early, *(i for i in section.instructions if i.name not in first)))


def _without_last_waits(section: Section, count: int) -> Section:
    """Returns handles instead of those of the first ``count`` outputs that nothing else waits for."""
    waits = {i.name: _operand(i) for i in section.instructions if i.op == WAIT and i.results == 1}
    used = Counter(name for instruction in section.instructions for name in _uses(instruction))
    used.update(value.node for value in section.outputs if value is not None)
    early = [v.node for v in section.outputs[:count] if v is not None and v.node in waits and used[v.node] == 1]
    outputs = tuple(waits[v.node] if v is not None and v.node in early else v for v in section.outputs)
    kept = tuple(i for i in section.instructions if i.name not in early)
    return replace(section, instructions=kept, outputs=outputs)


def _uses(instruction: Instruction) -> set[str]:
    return {value.node for value in instruction.operands}


def _with_late_waits(section: Section) -> list[Instruction]:
    """Delays waits until something uses their results; waits for values that are only returned come last, in order. A
    wait that does not directly follow its start stays where it is: it bounds how much is in flight."""
    delayed: dict[str, Instruction] = {}
    reordered: list[Instruction] = []
    for before, instruction in zip((None, *section.instructions), section.instructions, strict=False):
        if delayed:
            for name in sorted(_uses(instruction) & delayed.keys(), key=list(delayed).index):
                reordered.append(delayed.pop(name))
        if instruction.op == WAIT and before is not None and _operand(instruction).node == before.name:
            delayed[instruction.name] = instruction
        else:
            reordered.append(instruction)
    return [*reordered, *delayed.values()]


def _prefetched(section: Section, instructions: Sequence[Instruction], ops: tuple[str, ...]) -> list[Instruction]:
    """Moves the start of each of ``ops`` (gathers, fetches) of inputs to before the wait for the one before it."""
    gathers = _of_inputs(section, instructions, ops)
    waits = [i for i in instructions if i.op == WAIT and _operand(i).node in gathers]
    following = dict(zip((w.name for w in waits), waits[1:], strict=False))
    reordered = [gathers[_operand(waits[0]).node]] if waits else []
    for instruction in instructions:
        if instruction.name in gathers:
            continue
        if instruction.name in following:
            reordered.append(gathers[_operand(following[instruction.name]).node])
        reordered.append(instruction)
    return reordered


def _operand(wait: Instruction) -> Value:
    value = wait.args[0]
    assert isinstance(value, Value)
    return value


def _of_inputs(section: Section, instructions: Sequence[Instruction], ops: tuple[str, ...]) -> dict[str, Instruction]:
    """The instructions of ``ops`` that need nothing but inputs of the section, by name."""
    inputs = set(section.inputs)
    return {i.name: i for i in instructions if i.op in ops and _uses(i) <= inputs}
