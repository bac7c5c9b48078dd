"""Norms of tensors with fewer bits than their weights, as mixed precision has them: computed in the weights' dtype, the
result rounded to that of the input. Torch's kernels do so too, but what dtype their statistics have is not the same
everywhere, and a graph must know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decomposed import Table, aten, into

MIXED: Table = {}
_for = into(MIXED)


def _dtype_of_weights(x: Tensor, *weights: Tensor | None) -> torch.dtype | None:
    """The dtype with more bits that ``weights`` have, None if there is none."""
    given = [w.dtype for w in weights if w is not None]
    return given[0] if given and given[0].itemsize > x.dtype.itemsize else None


@_for(aten.native_layer_norm.default)
def layer_norm(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    wide = _dtype_of_weights(x, weight, bias)
    if wide is None:
        return NotImplemented
    y, mean, scale = aten.native_layer_norm.default(x.to(wide), shape, weight, bias, eps)
    return y.to(x.dtype), mean, scale


@_for(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    gradient: Tensor, x: Tensor, shape: Any, mean: Tensor, scale: Tensor, weight: Any, bias: Any, mask: Any
) -> Any:
    wide = _dtype_of_weights(x, weight, bias)
    if wide is None:
        return NotImplemented
    own, *others = aten.native_layer_norm_backward.default(
        gradient.to(wide), x.to(wide), shape, mean, scale, weight, bias, mask
    )
    return own if own is None else own.to(x.dtype), *others


@_for(aten.native_group_norm.default)
def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> Any:
    wide = _dtype_of_weights(x, weight, bias)
    if wide is None:
        return NotImplemented
    y, mean, scale = aten.native_group_norm.default(x.to(wide), weight, bias, *sizes)
    return y.to(x.dtype), mean, scale


@_for(aten.native_group_norm_backward.default)
def group_norm_backward(gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Any, *sizes: Any) -> Any:
    wide = _dtype_of_weights(x, weight)
    if wide is None:
        return NotImplemented
    own, *others = aten.native_group_norm_backward.default(gradient.to(wide), x.to(wide), mean, scale, weight, *sizes)
    return own if own is None else own.to(x.dtype), *others
