"""Advanced indexing, ``x[i, :, j]`` and ``x[i, :, j] = values``.

The index tensors broadcast to one *block* of dims, which replaces the indexed dims if these are adjacent, and otherwise
comes first. A dim that is not indexed, a dim of the block, and (by local operations) an indexed dim can each be
sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autopar.ir.placements import AxisStrategy, Placement
from autopar.passes.rule_language.claims import P, S, claim, claim_rule, shape_of
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, Operand, localiser

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Indexing:
    """The operand that indexes each indexed dim of ``x``, and the positions of dims of ``x`` and of the block in
    ``x[indices]``."""

    call: OpCall
    rank: int
    operands: dict[int, int]
    block: tuple[int, ...]

    @property
    def start(self) -> int:
        """The dim of the result at which the block begins."""
        dims = sorted(self.operands)
        return dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0

    def result_dim(self, dim: int) -> int:
        """The dim of the result that dim ``dim`` of ``x``, which must not be indexed, becomes."""
        kept = sum(other not in self.operands for other in range(dim))
        return kept if kept < self.start else kept + len(self.block)

    def result_shape(self) -> tuple[int, ...]:
        x = shape_of(self.call, 0)
        kept = [size for dim, size in enumerate(x) if dim not in self.operands]
        return (*kept[: self.start], *self.block, *kept[self.start :])

    def shard_block(self, dim: int) -> dict[int | None, Placement]:
        """Shards the index operands so that ``dim`` of the block is sharded."""
        placed: dict[int | None, Placement] = {}
        for index in self.operands.values():
            own = dim - len(self.block) + self.call.inputs[index].rank
            if own >= 0 and self.call.inputs[index].shape[own] != 1:
                placed[index] = S(own)
        return placed

    def shard_values(self, values: int, dim: int) -> dict[int | None, Placement]:
        """Shards ``values``, which broadcast to the result, to match ``dim`` of it."""
        own = dim - len(self.result_shape()) + self.call.inputs[values].rank
        return {values: S(own)} if own >= 0 and self.call.inputs[values].shape[own] != 1 else {}


def _indexing(call: OpCall) -> Indexing | None:
    """The indexing of a call; None if an index is a mask, since the shape of the result then depends on data."""
    indices = call.arg(1, "indices")
    operands = {dim: index.index for dim, index in enumerate(indices) if isinstance(index, Operand)}
    if not operands or any(call.inputs[index].dtype not in _INTEGERS for index in operands.values()):
        return None
    block = torch.broadcast_shapes(*(shape_of(call, index) for index in operands.values()))
    return Indexing(call, call.inputs[0].rank, operands, tuple(block))


@claim_rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, [index?, ...])``"""
    indexing = _indexing(call)
    if indexing is None:
        return
    for dim in range(indexing.rank):
        if dim not in indexing.operands:
            yield claim(call, {0: S(dim)}, [S(indexing.result_dim(dim))])
    for dim, size in enumerate(indexing.block):
        if size > 1:
            yield claim(call, indexing.shard_block(dim), [S(indexing.start + dim)])
    if call.inputs[0].dtype != torch.bool:
        yield claim(call, {0: P}, [P])
        for dim in indexing.operands:
            yield claim(call, {0: S(dim)}, [P], "autopar.masked_index")


def _masked_fill(call: OpCall) -> Iterator[AxisStrategy]:
    """``x[mask] = number``: the mask covers the first dims of ``x``, position by position."""
    indices = call.arg(1, "indices")
    if len(indices) != 1 or call.inputs[1].dtype != torch.bool or call.inputs[2].numel != 1:
        return
    if call.arg(3, "accumulate", False) or call.inputs[1].rank == 0:
        return
    for dim in range(call.inputs[0].rank):
        covered: dict[int | None, Placement] = {1: S(dim)} if dim < call.inputs[1].rank else {}
        yield claim(call, {0: S(dim), **covered}, [S(dim)])


@claim_rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, [index?, ...], values, accumulate)`` -> shape of ``x``"""
    indexing = _indexing(call)
    if indexing is None:
        yield from _masked_fill(call)
        return
    values = len(call.inputs) - 1
    for dim in range(indexing.rank):
        if dim in indexing.operands:
            yield claim(call, {0: S(dim)}, [S(dim)], "autopar.masked_index_put")
        else:
            matching = indexing.shard_values(values, indexing.result_dim(dim))
            yield claim(call, {0: S(dim), **matching}, [S(dim)])
    if not call.arg(3, "accumulate", False) or call.inputs[0].dtype == torch.bool:
        return
    yield claim(call, {0: P, values: P}, [P])
    for dim, size in enumerate(indexing.block):
        if size > 1:
            matching = indexing.shard_values(values, indexing.start + dim)
            yield claim(call, {0: P, **indexing.shard_block(dim), **matching}, [P])


def _offsets(context: LocalContext) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets of the local ``x`` in its indexed dims (0 in the others, where it is not used), and its global
    shape."""
    shape, indexing = shape_of(context.call, 0), _indexing(context.call)
    assert indexing is not None
    offsets = (context.input_offset(0, dim) if dim in indexing.operands else 0 for dim in range(len(shape)))
    return tuple(offsets), shape


@localiser("autopar.masked_index")
def local_index(context: LocalContext) -> LocalCall:
    return "autopar.masked_index", (*context.call.args[:2], *_offsets(context)), ()


@localiser("autopar.masked_index_put")
def local_index_put(context: LocalContext) -> LocalCall:
    call = context.call
    accumulate = bool(call.arg(3, "accumulate", False))
    return "autopar.masked_index_put", (*call.args[:3], accumulate, *_offsets(context)), ()
