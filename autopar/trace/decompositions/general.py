"""Decomposes operations while a model is traced.

Decomposed are

- reductions that are not linear (means, variances, norms, losses with an average, batch norm): as sums and
  pointwise operations they stay exact when a reduced dim is sharded, also into unequal shards, because only
  sums cross devices. A mean over tokens with ``ignore_index`` becomes one sum of losses over one count of
  tokens, both global;
- the log-softmax of a loss: as ``amax``, ``sum`` and pointwise operations, it needs two small reductions for a sharded
  vocabulary;
- operations fused only for speed on one device (``addmm``), whose parts have simpler rules;
- the many ways of creating a constant tensor: all become ``aten.full``;
- reads and writes by strides, where they are permutations and reshapes (:mod:`.strides`);
- repetition: an expansion and a reshape, which can also be sharded between the repeats;
- everything that draws random numbers (:mod:`.random`).

Where torch's own decomposition has the right form it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.torch_internals.operators import OpOverload, get_decompositions, overload_name

from . import batch_norm
from .mixed_precision import MIXED
from .products import PRODUCTS
from .random import RANDOM
from .registry import Decomposition, Table, accumulating, aten, into
from .strides import STRIDES

_OURS: Table = {}
_for = into(_OURS)

_TORCHS = (
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten._log_softmax_backward_data,
    *batch_norm.FORWARD,
    *batch_norm.BACKWARD,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.native_dropout_backward,
    aten.count_nonzero,
    aten.addr,
    aten.rsub,
    aten.stack,
    aten.glu,
    aten.glu_backward,
    aten.eye,
)

# Parts of the names of overloads that write into tensors passed to them.
_OUT = {"out", "input"}


@lru_cache(maxsize=1)
def decomposition_table() -> dict[OpOverload, Decomposition]:
    """The table for the tracer."""
    table: dict[Any, Decomposition] = batch_norm.in_float32(get_decompositions(_TORCHS))
    ours = {**_OURS, **PRODUCTS, **MIXED, **RANDOM, **STRIDES}
    return {**{op: how for op, how in table.items() if not _OUT & set(overload_name(op).split("_"))}, **ours}


def _dims(tensor: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """``dim`` as a list; None and the empty list mean all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(tensor.dim()))
    return [d % max(tensor.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _count(tensor: Tensor, dims: Sequence[int]) -> Any:
    """Elements per result of a reduction over ``dims``: an int, or symbolic."""
    return math.prod(tensor.shape[d] for d in dims) if tensor.dim() else 1


def _is_empty(tensor: Tensor) -> bool:
    """Whether a size is zero; a symbolic one never is."""
    return 0 in [size for size in tensor.shape if type(size) is int]


def _sum(tensor: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    total: Tensor = aten.sum.dim_IntList(tensor, dims, keepdim)
    return total


@_for(aten.mean.default, aten.mean.dim)
def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A sum divided by a count; the count is global, so that it needs no communication."""
    result = dtype or x.dtype
    dims = _dims(x, dim)
    wide = x.to(accumulating(result))
    average: Tensor = _sum(wide, dims, keepdim) / _count(x, dims)
    return average.to(result)


def _variance(x: Tensor, dim: Any, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    dims, wide = _dims(x, dim), x.to(accumulating(x.dtype))
    count = _count(x, dims)
    average = _sum(wide, dims, True) / count
    difference = wide - average
    squares = _square(torch.view_as_real(difference)).sum(-1) if x.is_complex() else _square(difference)
    degrees = count - (1 if correction is None else correction)
    spread = _sum(squares, dims, keepdim) / degrees
    average = average if keepdim or x.dim() == 0 else average.squeeze(dims)
    return spread.to(_real(x.dtype)), average.to(x.dtype)


def _square(x: Tensor) -> Tensor:
    return x * x


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


@_for(aten.var.correction)
def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Two passes, as torch's kernels do for accuracy, each a sum."""
    return _variance(x, dim, correction, keepdim)[0]


@_for(aten.std.correction)
def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _variance(x, dim, correction, keepdim)[0].sqrt()


@_for(aten.var_mean.correction)
def var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _variance(x, dim, correction, keepdim)


@_for(aten.std_mean.correction)
def std_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    spread, average = _variance(x, dim, correction, keepdim)
    return spread.sqrt(), average


@_for(aten._log_softmax.default)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """``x - max - log(sum(exp(x - max)))``: one maximum and one sum per row."""
    if x.dim() == 0 or _is_empty(x):
        return torch.zeros_like(x, dtype=torch.float32 if half_to_float else x.dtype)
    wide = x.to(accumulating(x.dtype))
    shifted = wide - aten.amax.default(wide, [dim], True)
    result: Tensor = shifted - _sum(shifted.exp(), [dim], True).log()
    return result if half_to_float else result.to(x.dtype)


@_for(aten.logsumexp.default)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """``max + log(sum(exp(x - max)))``: one maximum and one sum."""
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    dims, wide = _dims(x, dim), x.to(accumulating(x.dtype))
    if _is_empty(x):  # Nothing has a maximum.
        return _sum(wide.exp(), dims, keepdim).log().to(x.dtype)
    if x.dim() == 0 and not x.is_complex():
        return x.clone()
    largest = aten.amax.default(torch.view_as_real(wide)[..., 0] if x.is_complex() else wide, dims, True)
    # A row of infinities: subtracting the maximum would give nan.
    largest = torch.where(largest.abs() == math.inf, 0.0, largest)
    total = _sum((wide - largest).exp(), dims, keepdim).log()
    return (total + (largest if keepdim else largest.squeeze(dims))).to(x.dtype)


@_for(aten.linalg_vector_norm.default)
def vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Decomposes norms that are a function of one sum; others stay as they are."""
    if x.is_complex() or ord in (math.inf, -math.inf, 0) or x.dim() == 0:
        return NotImplemented
    result = dtype or x.dtype
    wide, dims = x.to(accumulating(result)), _dims(x, dim)
    if ord == 1:
        return _sum(wide.abs(), dims, keepdim).to(result)
    if ord == 2:
        return _sum(wide * wide, dims, keepdim).sqrt().to(result)
    return (_sum(wide.abs() ** ord, dims, keepdim) ** (1.0 / ord)).to(result)


@_for(aten.unbind.int)
def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [aten.select.int(x, dim, index) for index in range(int(x.shape[dim]))]


@_for(aten.copy.default)
def copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What ``copy_`` becomes in a graph without mutation: the source in the destination's shape and dtype."""
    return source.to(destination.dtype).expand(destination.shape).clone()


def _full(size: Any, value: Any, like: Tensor | None, dtype: Any, device: Any) -> Any:
    if like is not None:
        dtype, device = dtype or like.dtype, device or like.device
    return aten.full.default(
        size, value, dtype=dtype or torch.get_default_dtype(), device=device or torch.device("cpu")
    )


def _is_strided(options: dict[str, Any]) -> bool:
    return options.get("layout") in (None, torch.strided)


@_for(aten.zeros.default, aten.empty.memory_format)
def zeros(size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Uninitialised memory is zero in a graph: the same result on every run."""
    return _full(size, 0, None, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.empty_strided.default, aten.empty_permuted.default)
def zeros_in_order(size: Any, order: Any, **options: Any) -> Any:
    """Ignores strides: the order of elements in memory has no meaning in a graph."""
    return zeros(size, **options)


@_for(aten.ones.default)
def ones(size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _full(size, 1, None, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(x: Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _full(x.shape, 0, x, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.ones_like.default)
def ones_like(x: Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _full(x.shape, 1, x, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.full_like.default)
def full_like(x: Tensor, value: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _full(x.shape, value, x, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(x: Tensor, size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _full(size, 0, x, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.new_empty_strided.default)
def new_zeros_in_order(x: Tensor, size: Any, order: Any, **options: Any) -> Any:
    return new_zeros(x, size, **options)


@_for(aten.new_ones.default)
def new_ones(x: Tensor, size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _full(size, 1, x, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.new_full.default)
def new_full(x: Tensor, size: Any, value: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _full(size, value, x, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.scalar_tensor.default)
def scalar_tensor(value: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _full([], value, None, dtype, device) if _is_strided(options) else NotImplemented


@_for(aten.fill.Scalar)
def fill(x: Tensor, value: Any) -> Any:
    return _full(x.shape, value, x, None, None)


@_for(aten.zero.default)
def zero(x: Tensor) -> Any:
    return _full(x.shape, 0, x, None, None)


@_for(aten.repeat.default)
def repeat(x: Tensor, repeats: Sequence[Any]) -> Tensor:
    """Each repeated dim as ``repeats x size``, the first factor expanded; dims of one element need no second. The
    result is contiguous, as torch's is, so that it can be viewed."""
    own: list[Any] = [1] * (len(repeats) - x.dim()) + list(x.shape)
    thin: list[Any] = []
    wide: list[Any] = []
    for times, size in zip(repeats, own, strict=True):
        once, single = isinstance(times, int) and times == 1, isinstance(size, int) and size == 1
        thin += [size] if once or single else [1, size]
        wide += [size] if once else [times] if single else [times, size]
    expanded = x.reshape(thin).expand(wide)
    return expanded.reshape([times * size for times, size in zip(repeats, own, strict=True)]).contiguous()
