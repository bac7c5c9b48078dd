"""Local operations without an ATen equivalent: what a device computes on its shard of an indexed dim.

Each handles a dim that is *indexed by values* (the vocabulary of an embedding, the classes of a
cross-entropy); the device holds its positions ``offset <= p < offset + local length``. Reads give
zero for positions another device holds, so that the sum over devices is the whole result; writes skip them. A
position that no device holds (``size``, where given, is the length of the whole dim) is recorded, and makes the result
nan (:mod:`.index_range`).
All are pure and take any local length of at least one.

======================================  ====================================================
``autopar.masked_embedding``            rows of a shard of the table -> Partial(sum)
``autopar.masked_embedding_backward``   gradient of one shard of the table
``autopar.masked_gather``               ``gather`` along a sharded dim -> Partial(sum)
``autopar.masked_index_select``         ``index_select`` along a sharded dim -> Partial(sum)
``autopar.masked_index``                ``x[i, :, j]``, indexed dims sharded -> Partial(sum)
``autopar.masked_scatter_value``        ``scatter(x, dim, index, number)`` into a shard
``autopar.masked_scatter``              ``scatter(x, dim, index, source)`` into a shard
``autopar.masked_scatter_add``          ``scatter_add`` into a shard
``autopar.masked_index_add``            ``index_add`` into a shard
``autopar.masked_index_put``            ``x[i, :, j] = values`` into a shard
======================================  ====================================================

Attention has its own in :mod:`.attention`, grouped products in :mod:`.grouped_mm`, mixture-of-experts blocks
in :mod:`.experts`, the loss of connectionist temporal classification in :mod:`.ctc_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .attention import OPERATIONS as ATTENTION_OPERATIONS
from .ctc_loss import OPERATIONS as CTC_OPERATIONS
from .experts import OPERATIONS as EXPERT_OPERATIONS
from .grouped_mm import grouped_backward, grouped_inner, grouped_rows
from .index_range import any_outside, poisoned
from .random import DRAWS
from .random_streams import STREAM_OPERATIONS
from .write_rows import OPERATIONS as WRITE_OPERATIONS

Number = int | float | bool
Indices = Sequence[torch.Tensor | None]


def _to_local(index: torch.Tensor, offset: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(local, inside)``: positions counted from ``offset``, 0 where another device holds them, and whether
    this one does."""
    local = index - offset
    inside = (local >= 0) & (local < length)
    return local.masked_fill(~inside, 0), inside


def _along(mask: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """A mask of one dim (or none), shaped to broadcast along ``dim`` of a tensor of that rank."""
    return mask.reshape([-1 if d == dim else 1 for d in range(rank)])


def masked_embedding(weight: torch.Tensor, indices: torch.Tensor, offset: int, size: int | None = None) -> torch.Tensor:
    """``weight`` [local rows, width], ``indices`` [...] -> [..., width], zero where the row is not here."""
    bad = any_outside(indices, 0, size)
    local, inside = _to_local(indices, offset, weight.shape[0])
    rows: torch.Tensor = torch.ops.aten.embedding.default(weight, local)
    return poisoned(rows.masked_fill_(~inside.unsqueeze(-1), 0), bad)


def masked_embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, local_rows: int, padding_idx: int, offset: int
) -> torch.Tensor:
    """``grad`` [..., width], ``indices`` [...] -> [local rows, width]; ``padding_idx`` (global, negative:
    none) gets no gradient."""
    local = indices - offset
    skipped = (local < 0) | (local >= local_rows)
    if padding_idx >= 0:
        skipped |= indices == padding_idx
    # The operation itself can skip one row: append one, and send everything that another device holds there.
    local = local.masked_fill(skipped, local_rows)
    rows: torch.Tensor = torch.ops.aten.embedding_dense_backward.default(grad, local, local_rows + 1, local_rows, False)
    return rows.narrow(0, 0, local_rows)


def masked_gather(x: torch.Tensor, dim: int, index: torch.Tensor, offset: int, size: int | None = None) -> torch.Tensor:
    """``gather`` along a dim of which ``x`` holds a shard; the result has the shape of ``index`` and is zero where
    another device holds the position."""
    bad = any_outside(index, 0, size)
    local, inside = _to_local(index, offset, x.shape[dim])
    return poisoned(torch.gather(x, dim, local).masked_fill_(~inside, 0), bad)


def masked_index_select(
    x: torch.Tensor, dim: int, index: torch.Tensor, offset: int, size: int | None = None
) -> torch.Tensor:
    """``index_select`` along a dim of which ``x`` holds a shard; ``index`` has one dim."""
    dim %= x.dim()
    bad = any_outside(index, 0, size)
    local, inside = _to_local(index, offset, x.shape[dim])
    return poisoned(torch.index_select(x, dim, local).masked_fill_(~_along(inside, dim, x.dim()), 0), bad)


def _localised(
    x: torch.Tensor, indices: Indices, offsets: Sequence[int], global_shape: Sequence[int]
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """``indices`` counted from ``offsets`` in the dims of which ``x`` holds a part, and a mask of the places where all
    of them are inside."""
    local, inside = list(indices), torch.ones((), dtype=torch.bool, device=x.device)
    for dim, index in enumerate(indices):
        if index is not None and x.shape[dim] != global_shape[dim]:
            # Negative positions count from the end of the whole dim.
            positive = index.where(index >= 0, index + global_shape[dim])
            local[dim], here = _to_local(positive, offsets[dim], x.shape[dim])
            inside = inside & here
    return local, inside


def _inside_result(inside: torch.Tensor, indices: Indices, rank: int) -> torch.Tensor:
    """``inside``, shaped to broadcast against ``x[indices]`` of ``x`` with that rank: indexed dims together
    become one block, in place if adjacent, in front otherwise."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    block = len(torch.broadcast_shapes(*(index.shape for index in indices if index is not None)))
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    behind = rank - len(dims) - (dims[0] if adjacent else 0)
    return inside.reshape((1,) * (block - inside.dim()) + tuple(inside.shape) + (1,) * behind)


def masked_index(
    x: torch.Tensor, indices: Indices, offsets: Sequence[int], global_shape: Sequence[int]
) -> torch.Tensor:
    """``x[indices]`` where ``x`` is a part, from ``offsets`` on, of a tensor of ``global_shape``; integer
    indices only.

    Both have one entry per dim of ``x``; only those of indexed dims are read.
    """
    bad = _any_outside_shape(indices, global_shape)
    local, inside = _localised(x, indices, offsets, global_shape)
    rows: torch.Tensor = torch.ops.aten.index.Tensor(x, local)
    return poisoned(rows.masked_fill_(~_inside_result(inside, indices, x.dim()), 0), bad)


def _any_outside_shape(indices: Indices, global_shape: Sequence[int]) -> bool:
    outside = [
        index is not None and any_outside(index, -size, size)
        for index, size in zip(indices, global_shape, strict=False)
    ]
    return any(outside)


def masked_scatter(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, offset: int) -> torch.Tensor:
    """``scatter`` of ``source`` into a dim of which ``x`` holds a shard: positions held elsewhere are not
    written."""
    dim %= max(x.dim(), 1)
    length = x.shape[dim]
    local, inside = _to_local(index, offset, length)
    if index.shape[dim] == 1:
        # Nothing else is written in this line of x, so a position held elsewhere may write back the value it has here.
        window = source[tuple(slice(0, size) for size in index.shape)]
        return torch.scatter(x, dim, local, window.where(inside, torch.gather(x, dim, local)))
    spare = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    return spare.scatter_(dim, local.masked_fill(~inside, length), source).narrow(dim, 0, length).contiguous()


def masked_scatter_value(x: torch.Tensor, dim: int, index: torch.Tensor, value: Number, offset: int) -> torch.Tensor:
    """``scatter`` of one number into a dim of which ``x`` holds a shard."""
    source = torch.full((), value, dtype=x.dtype, device=x.device).expand(index.shape)
    return masked_scatter(x, dim, index, source, offset)


def masked_scatter_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, offset: int
) -> torch.Tensor:
    """``scatter_add`` into a dim of which ``x`` holds a shard."""
    local, inside = _to_local(index, offset, x.shape[dim])
    window = source[tuple(slice(0, size) for size in index.shape)]
    return torch.scatter_add(x, dim, local, window.masked_fill(~inside, 0))


def masked_index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, offset: int, alpha: Number = 1
) -> torch.Tensor:
    """``index_add`` into a dim of which ``x`` holds a shard; ``index`` has one dim."""
    dim %= x.dim()
    local, inside = _to_local(index, offset, x.shape[dim])
    masked = source.masked_fill(~_along(inside, dim, source.dim()), 0)
    return torch.index_add(x, dim, local, masked, alpha=alpha)


def masked_index_put(
    x: torch.Tensor,
    indices: Indices,
    values: torch.Tensor,
    accumulate: bool,
    offsets: Sequence[int],
    global_shape: Sequence[int],
) -> torch.Tensor:
    """``x[indices] = values`` (or ``+=``) where ``x`` is a part, from ``offsets`` on, of a tensor of
    ``global_shape``."""
    bad = _any_outside_shape(indices, global_shape)
    local, inside = _localised(x, indices, offsets, global_shape)
    dim = next((d for d, i in enumerate(indices) if i is not None and x.shape[d] != global_shape[d]), None)
    if dim is None:
        return poisoned(torch.index_put(x, tuple(indices), values, accumulate), bad)
    index, length = local[dim], x.shape[dim]
    assert index is not None
    # Everything that another device holds goes to a spare position, which is cut off afterwards.
    local[dim] = torch.where(inside, index, length)
    spare = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    written: torch.Tensor = torch.ops.aten.index_put_.default(spare, local, values, accumulate)
    return poisoned(written.narrow(dim, 0, length).contiguous(), bad)


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied only if it is not contiguous."""
    return x.contiguous()


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied only if its last dim is not contiguous."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


# Kernels that assume contiguous operands whatever their strides: some give nan, others raise. A graph shows no strides,
# and on shards they differ.
_NEED_ROWS = ("view_as_complex.",)
_NEED_ALL = ("_embedding_bag", "as_strided.", "as_strided_scatter.", "view.dtype")


@cache
def layout_for(op: str) -> str | None:
    """The local operation (``autopar.dense``, ``autopar.dense_rows``) that operands of ``op`` need first, if any.
    Operations of other libraries always need one: a model that made an operand contiguous for them did so in a copy
    that the graph does not contain."""
    name = op.removeprefix("aten.")
    if name.startswith(_NEED_ALL) or not op.startswith(("aten.", "prims.", "autopar.")):
        return "autopar.dense"
    return "autopar.dense_rows" if name.startswith(_NEED_ROWS) else None


LOCAL_OPS: dict[str, Callable[..., Any]] = (
    {
        f"autopar.{function.__name__}": function
        for function in (
            masked_embedding,
            masked_embedding_backward,
            masked_gather,
            masked_index_select,
            masked_index,
            masked_scatter,
            masked_scatter_value,
            masked_scatter_add,
            masked_index_add,
            masked_index_put,
            dense,
            dense_rows,
            grouped_rows,
            grouped_inner,
            grouped_backward,
        )
    }
    | ATTENTION_OPERATIONS
    | EXPERT_OPERATIONS
    | CTC_OPERATIONS
    | WRITE_OPERATIONS
    | DRAWS
    | STREAM_OPERATIONS
)
"""The local operations by the names that programs use, including those of :mod:`.random`."""
