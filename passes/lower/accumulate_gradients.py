"""Sections that add the gradients they make to those of earlier microbatches.

A gradient that is a product is added by the product itself, which then makes no tensor of its own; any other is added
as soon as it is made. So beside the sums there is never more than one gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.node import Value, values_in
from autopar.ir.program import Instruction, Section

PRODUCT, ADDED_PRODUCT, ADD = "aten.mm.default", "aten.addmm_.default", "aten.add_.Tensor"


def adding(section: Section, count: int) -> Section:
    """``section`` with the sums so far of its last ``count`` outputs as further inputs, in their order: it adds to
    them in place, and returns them in the place of those outputs. It is called ``more_``, then the section's name."""
    first = len(section.outputs) - count
    wanted = section.outputs[first:]
    sums = _names(section, count)
    owed: dict[Value, list[str]] = {}
    for value, total in zip(wanted, sums, strict=True):
        assert value is not None
        owed.setdefault(value, []).append(total)
    uses = _uses(section)
    given = [add for name in section.inputs for add in _adds(Value(name), owed.get(Value(name), []))]
    made = [new for old in section.instructions for new in _with_adds(old, owed, uses)]
    outputs = (*section.outputs[:first], *(Value(f"{total}_more") for total in sums))
    return Section(f"more_{section.name}", (*section.inputs, *sums), (*given, *made), outputs)


def _names(section: Section, count: int) -> list[str]:
    """Names for the sums that nothing in the section has."""
    taken = {*section.inputs, *(i.name for i in section.instructions)}
    prefix = "sum"
    while any(name.startswith(f"{prefix}_so_far_") for name in taken):
        prefix += "_"
    return [f"{prefix}_so_far_{position}" for position in range(count)]


def _uses(section: Section) -> Counter[Value]:
    found = Counter(value for value in section.outputs if value is not None)
    for instruction in section.instructions:
        found.update(values_in((instruction.args, tuple(arg for _, arg in instruction.kwargs))))
    return found


def _adds(value: Value, totals: list[str]) -> Iterator[Instruction]:
    for total in totals:
        yield Instruction(f"{total}_more", ADD, (Value(total), value))


def _with_adds(old: Instruction, owed: dict[Value, list[str]], uses: Counter[Value]) -> Iterator[Instruction]:
    """``old``, and what adds those of its results that are gradients."""
    value = Value(old.name)
    totals = owed.get(value, [])
    if old.op == PRODUCT and len(totals) == 1 and uses[value] == 1:
        (total,) = totals
        yield replace(old, name=f"{total}_more", op=ADDED_PRODUCT, args=(Value(total), *old.args))
        return
    yield old
    for index in range(old.results):
        yield from _adds(Value(old.name, index), owed.get(Value(old.name, index), []))
