"""Random operands, the same on every run."""

from __future__ import annotations

import torch

_GENERATOR = torch.Generator().manual_seed(0)


def floats(*shape: int) -> torch.Tensor:
    """Uniform in [-1, 1), single precision."""
    return torch.rand(shape, generator=_GENERATOR) * 2 - 1


def integers(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    """Uniform in [low, high)."""
    return torch.randint(low, high, shape, generator=_GENERATOR)


def permutations(length: int, *shape: int) -> torch.Tensor:
    """Along the last dim of ``shape``, positions below ``length`` without repeats."""
    noise = torch.rand((*shape[:-1], length), generator=_GENERATOR)
    return noise.argsort(-1)[..., : shape[-1]].contiguous()


def masks(*shape: int) -> torch.Tensor:
    """True for about half."""
    return torch.rand(shape, generator=_GENERATOR) < 0.5
