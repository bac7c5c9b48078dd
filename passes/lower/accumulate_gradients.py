"""Makes sections add their gradients to those of earlier microbatches.

If a gradient is a product, the product itself accumulates it and writes no tensor of its own. If it is a cast, such as
that of a gradient in bf16 to the dtype of its parameter, what is cast is added instead, which is the same sum: the
addition widens it. Any other gradient is added as soon as it is computed. So there is never more than one gradient in
addition to the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from autopar.ir.node import CAST, Value
from autopar.ir.program import Instruction, Section

# Of the gradients' dtypes these have at least as many bits as any that is cast to them in training.
_WIDE = (torch.float32, torch.float64)
PRODUCT, ADDED_PRODUCT, ADD = "aten.mm.default", "aten.addmm_.default", "aten.add_.Tensor"


def adding(section: Section, count: int) -> Section:
    """``section`` that takes the sums so far of its last ``count`` outputs as further inputs, in their order, adds to
    them in place, and returns them instead of those outputs. Its name is ``more_`` and the section's name."""
    first = len(section.outputs) - count
    wanted = section.outputs[first:]
    sums = _names(section, count)
    owed: dict[Value, list[str]] = {}
    for value, total in zip(wanted, sums, strict=True):
        assert value is not None
        owed.setdefault(value, []).append(total)
    uses = _uses(section)
    adds_of_inputs = [add for name in section.inputs for add in _adds(Value(name), owed.get(Value(name), []))]
    computed = [new for old in section.instructions for new in _with_adds(old, owed, uses)]
    outputs = (*section.outputs[:first], *(Value(f"{total}_more") for total in sums))
    return Section(f"more_{section.name}", (*section.inputs, *sums), (*adds_of_inputs, *computed), outputs)


def _names(section: Section, count: int) -> list[str]:
    """Fresh names for the sums."""
    taken = {*section.inputs, *(i.name for i in section.instructions)}
    prefix = "sum"
    while any(name.startswith(f"{prefix}_so_far_") for name in taken):
        prefix += "_"
    return [f"{prefix}_so_far_{position}" for position in range(count)]


def _uses(section: Section) -> Counter[Value]:
    counts = Counter(value for value in section.outputs if value is not None)
    for instruction in section.instructions:
        counts.update(instruction.operands)
    return counts


def _adds(value: Value, totals: list[str]) -> Iterator[Instruction]:
    for total in totals:
        yield Instruction(f"{total}_more", ADD, (Value(total), value))


def _with_adds(old: Instruction, owed: dict[Value, list[str]], uses: Counter[Value]) -> Iterator[Instruction]:
    """``old``, followed by instructions that accumulate those of its results that are gradients."""
    value = Value(old.name)
    totals = owed.get(value, [])
    if len(totals) == 1 and uses[value] == 1:
        (total,) = totals
        if old.op == PRODUCT:
            yield replace(old, name=f"{total}_more", op=ADDED_PRODUCT, args=(Value(total), *old.args))
            return
        if _widens(old):
            yield from _adds(old.operands[0], totals)
            return
    yield old
    for index in range(old.results):
        yield from _adds(Value(old.name, index), owed.get(Value(old.name, index), []))


def _widens(old: Instruction) -> bool:
    """Whether ``old`` only casts its operand to a dtype that holds the same number."""
    return old.op == CAST and [key for key, _ in old.kwargs] == ["dtype"] and old.kwargs[0][1] in _WIDE
