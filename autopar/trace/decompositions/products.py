"""Decomposes products that are fused with sums, or have special shapes, into matrix products with simpler rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import Table, aten, into

PRODUCTS: Table = {}
_for = into(PRODUCTS)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


@_for(aten.addmm.default)
def addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(aten.mm.default(a, b), alpha)
    return product if beta == 0 else product + _scaled(x, beta)


@_for(aten.baddbmm.default)
def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(aten.bmm.default(a, b), alpha)
    return product if beta == 0 else product + _scaled(x, beta)


@_for(aten.addbmm.default)
def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(aten.sum.dim_IntList(aten.bmm.default(a, b), [0]), alpha)
    return product if beta == 0 else product + _scaled(x, beta)


@_for(aten.addmv.default)
def addmv(x: Tensor, a: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(mv(a, vector), alpha)
    return product if beta == 0 else product + _scaled(x, beta)


@_for(aten.mv.default)
def mv(a: Tensor, vector: Tensor) -> Any:
    return aten.mm.default(a, vector.unsqueeze(1)).squeeze(1)


@_for(aten.dot.default)
def dot(a: Tensor, b: Tensor) -> Any:
    return NotImplemented if a.is_complex() else aten.sum.dim_IntList(a * b, [0])


@_for(aten.linear.default)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.matmul(x, weight.t())
    return product if bias is None else product + bias


@_for(aten._trilinear.default)
def trilinear(
    x: Tensor, y: Tensor, z: Tensor, x_new: Any, y_new: Any, z_new: Any, summed: Any, unroll_dim: int = 1
) -> Any:
    """The sum over dims ``summed`` of the product of three tensors, each with new dims at ``x_new`` and so on: two
    matrix products."""
    rank = x.dim() + len(x_new)
    spelled = ["".join(chr(97 + d) for d in range(rank) if d not in new) for new in (x_new, y_new, z_new)]
    result = "".join(chr(97 + d) for d in range(rank) if d not in summed)
    return torch.einsum(f"{','.join(spelled)}->{result}", x, y, z)
