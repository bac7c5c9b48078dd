"""Look-ups inside compiled pieces: their indices are inputs of the piece, and are checked before it runs.

The sizes that indices must be inside of are known once the piece is traced (:class:`Lookups`). If an index is outside,
the piece runs uncompiled, where :mod:`.index_guards` and :mod:`autopar.ops.masked` note it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.node import Value, values_in
from autopar.ir.program import Instruction, Section
from autopar.ops.index_range import any_outside, is_outside
from autopar.ops.masked import LOCAL_OPS

from .torch_operations import Operation, resolve_aten

# What a dim of that size may be indexed with: from 0, or also from its end.
_Bounds = Callable[..., Iterator[tuple[int, int]]]


@dataclass(frozen=True)
class Range:
    """Input ``position`` of a piece has to be ``low <= i < high``."""

    position: int
    low: int
    high: int

    def holds_for(self, inputs: list[torch.Tensor]) -> bool:
        """Whether it is. On a GPU, which is not waited for, true, with an assertion that fails there."""
        index = inputs[self.position]
        if index.device.type == "cpu":
            return not is_outside(index, self.low, self.high)
        return not any_outside(index, self.low, self.high)


def _rows(table: torch.Tensor, *_: Any, **__: Any) -> Iterator[tuple[int, int]]:
    yield 0, table.shape[0]


def _dim(x: torch.Tensor, dim: int, *_: Any, **__: Any) -> Iterator[tuple[int, int]]:
    yield 0, x.shape[dim] if x.dim() else 1


def _dims(x: torch.Tensor, indices: list[torch.Tensor | None], *_: Any, **__: Any) -> Iterator[tuple[int, int]]:
    for size, index in zip(x.shape, indices, strict=False):
        if index is not None:
            yield -size, size


def _global_rows(table: Any, indices: Any, offset: int, size: int | None = None) -> Iterator[tuple[int, int]]:
    if size is not None:
        yield 0, size


def _global_dim(x: Any, dim: int, index: Any, offset: int, size: int | None = None) -> Iterator[tuple[int, int]]:
    if size is not None:
        yield 0, size


def _global_dims(x: Any, indices: Any, offsets: Any, global_shape: Any) -> Iterator[tuple[int, int]]:
    for size, index in zip(global_shape, indices, strict=False):
        if index is not None:
            yield -size, size


# By operation: which argument is the index, or the indices, and the bounds of each, given the arguments.
_LOOKUPS: Mapping[str, tuple[int, _Bounds]] = {
    "aten.embedding.default": (1, _rows),
    "aten.gather.default": (2, _dim),
    "aten.index_select.default": (2, _dim),
    "aten.scatter.value": (2, _dim),
    "aten.scatter.src": (2, _dim),
    "aten.index.Tensor": (1, _dims),
    "aten._unsafe_index.Tensor": (1, _dims),
    "autopar.masked_embedding": (1, _global_rows),
    "autopar.masked_gather": (2, _global_dim),
    "autopar.masked_index_select": (2, _global_dim),
    "autopar.masked_index": (1, _global_dims),
}
LOOKUPS = frozenset(_LOOKUPS)
"""Operations that may be part of a piece if their indices are inputs of it."""


def indices_of(instruction: Instruction) -> tuple[Value, ...]:
    """The indices that a look-up reads; none of other operations."""
    found = _LOOKUPS.get(instruction.op)
    return () if found is None else tuple(values_in(instruction.args[found[0]]))


class Lookups:
    """The look-ups of a piece that are ``checked``. ``operations``: those that, while the piece is traced, write down
    the ranges of their indices, in ``ranges``."""

    def __init__(self, section: Section, checked: Container[str] = LOOKUPS) -> None:
        self.ranges: set[Range] = set()
        inputs = {name: position for position, name in enumerate(section.inputs)}
        found = [i for i in section.instructions if i.op in _LOOKUPS and i.op in checked]
        self._positions = iter([[inputs[value.node] for value in indices_of(i)] for i in found])
        self.operations = {i.op: self._recording(i.op) for i in found}

    def _recording(self, op: str) -> Operation:
        operation: Operation = LOCAL_OPS.get(op) or resolve_aten(op)
        bounds = _LOOKUPS[op][1]

        def run(*args: Any, **kwargs: Any) -> Any:
            # Instructions run in their order.
            for position, (low, high) in zip(next(self._positions), bounds(*args, **kwargs), strict=False):
                self.ranges.add(Range(position, low, high))
            return operation(*args, **kwargs)

        return run
