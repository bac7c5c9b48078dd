"""Decomposes operations that draw random numbers into the draws of :mod:`autopar.ops.random`, whose numbers do not
depend on the plan, and operations on them that shard like any other.

Draws by rejection (Poisson, binomial, gamma and Dirichlet distributions) have no such form: every device draws them
whole, from rank 0's generator (:mod:`autopar.runtime.execute.randomness`). So it does for an operation that names a
generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from autopar.ops import random as random_ops
from autopar.torch_internals.operators import OpOverload

from .registry import Decomposition, Table, accumulating, aten, into

draw: Any = torch.ops.autopar
assert random_ops.DRAWS

RANDOM: Table = {}
# Smaller than the least uniform number above 0: its logarithm is finite.
# Half of 2**-24, the step of uniform float32 numbers (autopar/ops/random.py).
_TINY = 2.0**-25


def _for(*ops: OpOverload) -> Callable[[Decomposition], Decomposition]:
    def register(function: Decomposition) -> Decomposition:
        @wraps(function)
        def plain(*args: Any, generator: Any = None, layout: Any = None, **options: Any) -> Any:
            if generator is not None or layout not in (None, torch.strided):
                return NotImplemented
            return function(*args, **{key: value for key, value in options.items() if key not in _STORAGE})

        return into(RANDOM)(*ops)(plain)

    return register


_STORAGE = ("pin_memory", "memory_format")


def _uniform(size: Any, dtype: torch.dtype | None, device: Any) -> Any:
    """Uniform in [0, 1) in any floating dtype; for complex numbers, both parts."""
    kind = dtype or torch.get_default_dtype()
    if kind.is_complex:
        return torch.complex(*(_uniform(size, kind.to_real(), device) for _ in range(2)))
    return draw.uniform(draw.random_state(), size, dtype=kind, device=torch.device(device or "cpu"))


def _normal(size: Any, dtype: torch.dtype | None, device: Any) -> Any:
    kind = dtype or torch.get_default_dtype()
    if kind.is_complex:
        parts = _normal([*size, 2], kind.to_real(), device) * math.sqrt(0.5)
        return torch.view_as_complex(parts)
    return draw.normal(draw.random_state(), size, dtype=kind, device=torch.device(device or "cpu"))


def _keep_mask(size: Any, p: float, dtype: torch.dtype, device: Any) -> Any:
    return draw.bernoulli(draw.random_state(), size, p, dtype=dtype, device=device)


def _integers(low: Any, high: Any, size: Any, dtype: torch.dtype, device: Any) -> Any:
    """Uniform in ``[low, high)``; the bias of the remainder is at most ``(high - low) / 2^63``."""
    where = torch.device(device or "cpu")
    bits = draw.random_bits(draw.random_state(), size, dtype=torch.int64, device=where)
    return (bits % (high - low) + low).to(dtype)


def _exponential(size: Any, dtype: torch.dtype, device: Any) -> Any:
    """The standard exponential distribution, never 0."""
    return -torch.log1p(-_uniform(size, accumulating(dtype), device).clamp_min(_TINY)).to(dtype)


# ---- tensors made from nothing ----------------------------------------


@_for(aten.rand.default)
def rand(size: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _uniform(size, dtype, device)


@_for(aten.randn.default)
def randn(size: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _normal(size, dtype, device)


@_for(aten.randint.default)
def randint(high: Any, size: Any, *, dtype: Any = torch.int64, device: Any = None) -> Any:
    return _integers(0, high, size, dtype or torch.int64, device)


@_for(aten.randint.low)
def randint_low(low: Any, high: Any, size: Any, *, dtype: Any = torch.int64, device: Any = None) -> Any:
    return _integers(low, high, size, dtype or torch.int64, device)


@_for(aten.randperm.default)
def randperm(n: Any, *, dtype: Any = torch.int64, device: Any = None) -> Any:
    """The order of random keys; two keys are equal with probability n^2 / 2^64."""
    keys = draw.random_bits(draw.random_state(), [n], dtype=torch.int64, device=torch.device(device or "cpu"))
    return torch.argsort(keys).to(dtype or torch.int64)


@_for(aten.normal.float_float)
def normal_of_size(mean: float, std: float, size: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _normal(size, dtype, device) * std + mean


# ---- tensors like another ---------------------------------------------


@_for(aten.rand_like.default)
def rand_like(x: Tensor, *, dtype: Any = None, device: Any = None) -> Any:
    return _uniform(x.shape, dtype or x.dtype, device or x.device)


@_for(aten.randn_like.default)
def randn_like(x: Tensor, *, dtype: Any = None, device: Any = None) -> Any:
    return _normal(x.shape, dtype or x.dtype, device or x.device)


@_for(aten.randint_like.default)
def randint_like(x: Tensor, high: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _integers(0, high, x.shape, dtype or x.dtype, device or x.device)


@_for(aten.randint_like.low_dtype)
def randint_like_low(x: Tensor, low: Any, high: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _integers(low, high, x.shape, dtype or x.dtype, device or x.device)


@_for(aten.bernoulli.p)
def bernoulli_p(x: Tensor, p: float = 0.5) -> Any:
    return _keep_mask(x.shape, p, x.dtype, x.device)


@_for(aten.bernoulli.default)
def bernoulli(p: Tensor) -> Any:
    return (_uniform(p.shape, p.dtype, p.device) < p).to(p.dtype)


@_for(aten.bernoulli.Tensor)
def bernoulli_tensor(x: Tensor, p: Tensor) -> Any:
    kind = p.dtype if p.is_floating_point() else torch.float32
    return (_uniform(x.shape, kind, x.device) < p).to(x.dtype)


@_for(aten.uniform.default)
def uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    least = complex(low, low) if x.is_complex() else low
    return _uniform(x.shape, x.dtype, x.device) * (high - low) + least


@_for(aten.normal_functional.default)
def normal_functional(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    return _normal(x.shape, x.dtype, x.device) * std + mean


@_for(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Any, std: Any = 1.0) -> Any:
    like = mean + std
    return _normal(like.shape, like.dtype, like.device) * std + mean


@_for(aten.exponential.default)
def exponential(x: Tensor, rate: float = 1.0) -> Any:
    return _exponential(x.shape, x.dtype, x.device) / rate


@_for(aten.geometric.default)
def geometric(x: Tensor, p: float) -> Any:
    waits = _exponential(x.shape, torch.float32, x.device) / -math.log1p(-p) if p < 1 else torch.zeros_like(x)
    return (torch.floor(waits) + 1).to(x.dtype)


@_for(aten.cauchy.default)
def cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Any:
    return torch.tan((_uniform(x.shape, x.dtype, x.device) - 0.5) * math.pi) * sigma + median


@_for(aten.log_normal.default)
def log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0) -> Any:
    return torch.exp(_normal(x.shape, x.dtype, x.device) * std + mean)


@_for(getattr(aten.random, "from"))
def random_from(x: Tensor, low: int, high: int | None) -> Any:
    return _integers(low, _limit(x.dtype) if high is None else high, x.shape, x.dtype, x.device)


@_for(aten.random.to, aten.random.default)
def random_to(x: Tensor, high: int | None = None) -> Any:
    return random_from(x, 0, high)


def _limit(dtype: torch.dtype) -> int:
    """One more than the largest integer such that ``dtype``, and a draw, can represent all integers up to it."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, (1 << 63) - 2) + 1


# ---- operations that contain a draw -----------------------------------


@_for(aten.native_dropout.default)
def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    """Backward needs only the mask: a byte per element, or nothing if it is drawn again."""
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _keep_mask(x.shape, 1 - p, torch.bool, x.device)
    return x * (mask.to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p))), mask


@_for(aten.rrelu_with_noise_functional.default)
def rrelu(x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Any:
    if not training:
        return torch.where(x <= 0, x * ((lower + upper) / 2), x), noise
    slope = torch.where(x <= 0, _uniform(x.shape, x.dtype, x.device) * (upper - lower) + lower, 1.0)
    return x * slope, slope.to(noise.dtype)


@_for(aten.multinomial.default)
def multinomial(x: Tensor, count: int, replacement: bool = False) -> Any:
    """One sample, or several without replacement: the first arrivals of an exponential race, as in torch's kernels;
    with replacement: positions of uniform numbers among the running sums."""
    if count == 1 or not replacement:
        race = x / _exponential(x.shape, x.dtype, x.device)
        return torch.topk(race, count, -1)[1]
    sums = torch.cumsum(x, -1)
    points = _uniform([*x.shape[:-1], count], x.dtype, x.device) * sums[..., -1:]
    return torch.searchsorted(sums, points, right=True).clamp_max(x.shape[-1] - 1)
