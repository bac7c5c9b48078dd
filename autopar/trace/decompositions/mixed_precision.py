"""Norms of tensors with fewer bits than their weights, as in mixed precision: computed in the weights' dtype, with the
result rounded to that of the input. Torch's kernels do the same, but the dtype of their statistics differs between
devices, and a graph must know it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import Table, aten, into

MIXED: Table = {}
_for = into(MIXED)


def _dtype_of_weights(x: Tensor, *weights: Tensor | None) -> torch.dtype | None:
    """The dtype of ``weights`` if it has more bits than that of ``x``, else None."""
    dtypes = [w.dtype for w in weights if w is not None]
    return dtypes[0] if dtypes and dtypes[0].itemsize > x.dtype.itemsize else None


def _widen(op: Any, *, narrow: tuple[int, ...], weights: tuple[int, ...]) -> None:
    """Registers ``op``. Its arguments at ``narrow`` (the last is the input) and its first result have the input's
    dtype; statistics and gradients of weights have the weights' dtype."""

    @_for(op)
    def widened(*args: Any) -> Any:
        x: Tensor = args[narrow[-1]]
        wide = _dtype_of_weights(x, *(args[at] for at in weights))
        if wide is None:
            return NotImplemented
        own, *others = op(*(arg.to(wide) if at in narrow else arg for at, arg in enumerate(args)))
        return own if own is None else own.to(x.dtype), *others


_widen(aten.native_layer_norm.default, narrow=(0,), weights=(2, 3))
_widen(aten.native_layer_norm_backward.default, narrow=(0, 1), weights=(5, 6))
_widen(aten.native_group_norm.default, narrow=(0,), weights=(1, 2))
_widen(aten.native_group_norm_backward.default, narrow=(0, 1), weights=(4,))
