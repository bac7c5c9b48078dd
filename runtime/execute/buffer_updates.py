"""Buffers that a program only counts on, such as the running averages of batch norms: updated in place where that is
safe, and never copied before.

A buffer that forward changes is copied before it runs, since values saved for backward may be views of it, and since a
second run of the same inputs needs its old value. Neither holds for a buffer that *nothing but its own new value
depends on*. If in addition one operation reads it and nothing else reads that operation's new value, the
operation writes into the buffer, as in eager execution.

>>> from autopar.ir.program import Instruction, Section
>>> count = Instruction("next", "aten.add.Tensor", (Value("count"), 1))
>>> section = Section("forward", ("x", "count"), (count,), (Value("x"), Value("next")))
>>> sorted(set_apart(section, {"count": 1}))
['count']
>>> sorted(updates(section, {"count": 1}))
['next']
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.node import Value
from autopar.ir.placements import REPLICATE
from autopar.ir.program import Instruction, Program, Section, TensorSlot
from autopar.runtime.torch_internals.functions import FUNCTIONS
from autopar.torch_internals.operators import is_mutable

from .torch_operations import Operation, resolve_aten

_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
_INTO_AVERAGES = FUNCTIONS["aten._native_batch_norm_legit.default"]
# The positions of a batch norm's averages among its operands, and of the new ones among its results.
_AVERAGES = {3: 3, 4: 4}


def _batch_norm(*args: Any) -> tuple[torch.Tensor, ...]:
    """What the functional operation computes, which copies the averages and then runs this kernel."""
    return (*_INTO_AVERAGES(*args), args[3], args[4])


def _add(buffer: torch.Tensor, other: Any, **kwargs: Any) -> torch.Tensor:
    """The sum in ``buffer``, if it has its shape and dtype."""
    if isinstance(other, torch.Tensor):
        fits = other.dtype == buffer.dtype and other.shape == buffer.shape
    else:
        fits = buffer.is_floating_point() or (type(other) is int and buffer.dtype != torch.bool)
    added: torch.Tensor = (torch.ops.aten.add_ if fits else torch.ops.aten.add).Tensor(buffer, other, **kwargs)
    return added


# How an operation writes a new value of a buffer into the buffer, which is an operand at these positions.
_IN_PLACE: Mapping[str, tuple[tuple[int, ...], Operation]] = {
    _BATCH_NORM: (tuple(_AVERAGES), _batch_norm),
    "aten.add.Tensor": ((0,), _add),
}


@dataclass(frozen=True)
class BufferUpdates:
    """For a program: the targets of its buffers that are set ``apart`` (:func:`set_apart`); of those, the ones that
    forward writes to (``written``); and what it runs for that instead of some instructions, by name (``replaced``)."""

    apart: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    replaced: Mapping[str, Operation] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, forward: Section, in_place: bool) -> BufferUpdates:
        """The updates in ``program``, whose section ``forward`` runs; ``in_place``: whether in place if possible."""
        results = {slot.target: index for index, slot in enumerate(program.results) if slot.kind == "mutation"}
        slots = {name: s for name, s in zip(forward.inputs, program.placeholders, strict=True) if s.kind == "buffer"}
        changed = {name: results[slot.target] for name, slot in slots.items() if slot.target in results}
        apart = set_apart(forward, changed)
        # A rank that has only a part of a buffer writes the whole of it, which it gathers.
        whole = {n: changed[n] for n in apart if _is_whole(slots[n]) and _is_whole(program.results[changed[n]])}
        replaced = updates(forward, whole) if in_place else {}
        written = updated(forward, replaced, whole)
        targets, of_written = (frozenset(slots[n].target for n in names) for names in (apart, written))
        return BufferUpdates(targets, of_written, replaced)


def _is_whole(slot: TensorSlot) -> bool:
    return all(placement == REPLICATE for placement in slot.placements)


def set_apart(section: Section, changed: Mapping[str, int]) -> frozenset[str]:
    """Those of the inputs in ``changed`` (with the positions of their new values among the outputs) that no other
    output depends on."""
    if not changed:
        return frozenset()
    bits = {name: 1 << index for index, name in enumerate(changed)}
    reached = {Value(name): bit for name, bit in bits.items()}
    fixed = 0
    for instruction in section.instructions:
        found = _reached(instruction, reached)
        if any(found.values()) and not _is_pure(instruction.op):
            fixed |= _union(found.values())
        reached.update({value: bit for value, bit in found.items() if bit})
    for position, value in enumerate(section.outputs):
        own = next((bits[name] for name, place in changed.items() if place == position), 0)
        fixed |= 0 if value is None else reached.get(value, 0) & ~own
    return frozenset(name for name, bit in bits.items() if not bit & fixed)


def _union(bits: Iterable[int]) -> int:
    result = 0
    for each in bits:
        result |= each
    return result


def _reached(instruction: Instruction, reached: Mapping[Value, int]) -> dict[Value, int]:
    """Which buffers each result depends on."""
    if instruction.op == _BATCH_NORM and not any(v in reached for v in _others(instruction)):
        averages = {result: reached.get(instruction.args[place], 0) for place, result in _AVERAGES.items()}
        return {Value(instruction.name, index): bit for index, bit in averages.items()}
    both = _union(reached.get(value, 0) for value in instruction.operands)
    return {Value(instruction.name, index): both for index in range(max(instruction.results, 1))} if both else {}


def _others(instruction: Instruction) -> Sequence[object]:
    """The operands of a batch norm beside its averages. It reads those in training only to compute the new ones."""
    others = [arg for place, arg in enumerate(instruction.args) if place not in _AVERAGES]
    return others if instruction.args[5] is True else instruction.args


def _is_pure(op: str) -> bool:
    """Whether ``op`` is a function of torch's, of its operands alone, that can be repeated with others unnoticed."""
    if not op.startswith("aten."):
        return False
    operation = resolve_aten(op)
    return not is_mutable(operation) and torch.Tag.nondeterministic_seeded not in operation.tags


def updates(section: Section, apart: Mapping[str, int]) -> dict[str, Operation]:
    """The instructions, by name, that write into the buffers in ``apart`` (:func:`set_apart`) that they read, and how.
    An instruction that updates several does so for all of them or for none."""
    reads = Counter(value for i in section.instructions for value in i.operands)
    reads.update(value for value in section.outputs if value is not None)
    found: dict[str, Operation] = {}
    for instruction in section.instructions:
        places, operation = _IN_PLACE.get(instruction.op, ((), None))
        pairs = [(instruction.args[place], _result(instruction, place)) for place in places]
        if operation is not None and all(_replaces(section, apart, reads, *pair) for pair in pairs):
            found[instruction.name] = operation
    return found


def _result(instruction: Instruction, place: int) -> Value:
    return Value(instruction.name, _AVERAGES[place] if instruction.op == _BATCH_NORM else 0)


def _replaces(section: Section, apart: Mapping[str, int], reads: Mapping[Value, int], old: object, new: Value) -> bool:
    """Whether ``old`` is a buffer that is read only here, and ``new`` its new value and nothing else."""
    if not isinstance(old, Value) or old.index or old.node not in apart:
        return False
    return reads[old] == 1 and reads[new] == 1 and section.outputs[apart[old.node]] == new


def updated(section: Section, run: Container[str], apart: Mapping[str, int]) -> frozenset[str]:
    """The buffers that the instructions ``run`` write into."""
    return frozenset(
        value.node
        for instruction in section.instructions
        if instruction.name in run
        for value in instruction.operands
        if value.node in apart
    )
