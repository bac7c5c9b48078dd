"""Writes into caches in place, where a section takes them as they rest on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from autopar.ir.node import Value
from autopar.ir.program import Section
from autopar.ops.write_rows import WRITE_ROWS, WRITE_ROWS_IN_PLACE


def in_place(section: Section, caches: Collection[str]) -> Section:
    """``section`` with ``autopar.write_rows`` in place where its operand is one of the inputs ``caches``, and nothing
    else reads that."""
    if not caches:
        return section
    used = Counter(value for instruction in section.instructions for value in instruction.operands)
    used.update(value for value in section.outputs if value is not None)
    free = {Value(name) for name in caches if used[Value(name)] == 1}
    if not free:
        return section
    instructions = tuple(
        replace(step, op=WRITE_ROWS_IN_PLACE) if step.op == WRITE_ROWS and step.args[0] in free else step
        for step in section.instructions
    )
    return replace(section, instructions=instructions)
