"""Casts of all weights as one operation.

Under mixed precision a step begins with a cast of each weight. One after the other, a hundred and more of a layered
model take the processor longer than the GPU (2.7 ms beside 0.9 ms for 374 million parameters on an H200); as a list of
tensors, one millisecond for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from autopar.ir.node import Value
from autopar.ir.program import Instruction, Section
from autopar.runtime.torch_internals.tensor_lists import copy_each

OPERATION = "autopar.cast_all"
_CAST = "aten._to_copy.default"


def cast_all(values: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Each of ``values`` as ``dtype``, with the same strides."""
    casts = [torch.empty_like(value, dtype=dtype) for value in values]
    copy_each(casts, values)
    return casts


def with_casts_at_once(section: Section) -> Section:
    """``section``, in which casts to one dtype that follow each other are one instruction.

    refresh(%w, %b):
      %x = aten._to_copy.default(%w, dtype=torch.bfloat16)
      %y = aten._to_copy.default(%b, dtype=torch.bfloat16)
      return %x, %y

    becomes::

    refresh(%w, %b):
      %x, %x.1 = autopar.cast_all([%w, %b], torch.bfloat16)
      return %x, %x.1
    """
    renamed: dict[Value, Value] = {}
    done: list[Instruction] = []
    for casts in _runs(section.instructions):
        if len(casts) > 1:
            first, values = casts[0], tuple(cast.operands[0] for cast in casts)
            dtype = dict(first.kwargs)["dtype"]
            renamed |= {Value(cast.name): Value(first.name, index) for index, cast in enumerate(casts)}
            done.append(Instruction(first.name, OPERATION, (values, dtype), (), len(casts)).with_values(renamed))
        else:
            done += [instruction.with_values(renamed) for instruction in casts]
    outputs = tuple(value and renamed.get(value, value) for value in section.outputs)
    return replace(section, instructions=tuple(done), outputs=outputs)


def _runs(instructions: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Casts to one dtype that follow each other, none of another's result; every other instruction alone."""
    for dtype, run in groupby(instructions, _dtype):
        if dtype is None:
            yield from ([instruction] for instruction in run)
            continue
        together: list[Instruction] = []
        for cast in run:
            if {value.node for value in cast.operands} & {other.name for other in together}:
                yield together
                together = []
            together.append(cast)
        yield together


def _dtype(instruction: Instruction) -> object:
    """The dtype of a cast that changes nothing else; None for any other instruction."""
    is_plain = instruction.op == _CAST and len(instruction.args) == 1
    return instruction.kwargs[0][1] if is_plain and [name for name, _ in instruction.kwargs] == ["dtype"] else None
