"""Decomposes reads and writes by strides, which a graph does not show.

Most read or write every element once, and are a permutation and a reshape: torch's pools give their result the strides
of a memory format in this way, for which autograd writes a scatter by strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from autopar.torch_internals.fake_tensors import expression_of, hint_of

from .registry import Table, aten, into

STRIDES: Table = {}
_for = into(STRIDES)


def _memory_order(x: Tensor) -> list[int] | None:
    """The dims from outermost to innermost in memory; None if ``x`` is not contiguous in any order of its dims."""
    if x.is_contiguous():
        return list(range(x.dim()))
    order = sorted(range(x.dim()), key=lambda dim: -x.stride()[dim])
    return order if x.permute(order).is_contiguous() and x.storage_offset() == 0 else None


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _expression(size: Any) -> Any:
    return expression_of(size) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _order_of_all(numel: Any, size: Sequence[Any], stride: Sequence[Any], offset: Any) -> list[int] | None:
    """The dims from outermost to innermost if ``size`` and ``stride`` describe each of ``numel`` contiguous elements
    once; else None. It compares expressions, so that a symbolic size stays one."""
    if not isinstance(offset, int) or offset:
        return None
    hints = [hint_of(step) if isinstance(step, torch.SymInt) else step for step in stride]
    # The stride of a dim of one element means nothing.
    single = [isinstance(length, int) and length == 1 for length in size]
    order = sorted(range(len(size)), key=lambda dim: (not single[dim], -hints[dim]))
    sizes, strides = [_expression(length) for length in size], [_expression(step) for step in stride]
    inner = sympy.Integer(1)
    for dim in reversed(order):
        if not single[dim] and sympy.expand(strides[dim] - inner) != 0:
            return None
        inner *= sizes[dim]
    return order if sympy.expand(inner - _expression(numel)) == 0 else None


def _offset(x: Tensor, storage_offset: Any) -> Any:
    """``storage_offset`` counted from the first element of ``x``, with which its memory begins in a graph."""
    return 0 if storage_offset is None else storage_offset - x.storage_offset()


def _starts_memory(x: Tensor) -> bool:
    start = x.storage_offset()
    return isinstance(start, int) and start == 0


def _in_order(x: Tensor, order: list[int]) -> Tensor:
    """``x``, contiguous and at the start of its memory."""
    permuted = x.permute(order)
    return permuted if _starts_memory(x) else permuted.clone()


@_for(aten.as_strided.default)
def as_strided(x: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """``as_strided`` of a contiguous tensor, which any tensor can be made; a permuted one is permuted back first."""
    order, offset = _memory_order(x), _offset(x, storage_offset)
    if order is None:
        return NotImplemented
    dims = _order_of_all(math.prod(x.shape), size, stride, offset)
    if dims is not None:
        return x.permute(order).reshape([size[dim] for dim in dims]).permute(_inverse(dims))
    if x.is_contiguous() and _starts_memory(x):
        return NotImplemented
    return aten.as_strided.default(_in_order(x, order), size, stride, offset)


@_for(aten.as_strided_scatter.default)
def as_strided_scatter(x: Tensor, source: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """``as_strided_scatter`` into a contiguous tensor. If it writes all elements, ``source`` has them in another
    order."""
    order, offset = _memory_order(x), _offset(x, storage_offset)
    if order is None:
        return NotImplemented
    dims = _order_of_all(math.prod(x.shape), size, stride, offset)
    if dims is not None:
        return source.permute(dims).reshape([x.shape[dim] for dim in order]).permute(_inverse(order)).clone()
    if x.is_contiguous() and _starts_memory(x):
        return NotImplemented
    written = aten.as_strided_scatter.default(_in_order(x, order), source, size, stride, offset)
    return written.permute(_inverse(order))
