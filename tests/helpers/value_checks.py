"""Functions that look at values, most of them only to raise. Not in a test file, whose ``assert`` pytest rewrites."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Checked = Callable[[Tensor, bool], Tensor]


def raises(x: Tensor, strict: bool) -> Tensor:
    if x.isnan().any():
        raise ValueError("not a number")
    return x


def raises_unless(x: Tensor, strict: bool) -> Tensor:
    if not (x < 10).all():
        message = "too large"
        raise ValueError(message)
    return x


def either(x: Tensor, strict: bool) -> Tensor:
    if (x > 10).any() or not strict or not x.isfinite().all():
        raise ValueError("too large, or not finite")
    return x


def both(x: Tensor, strict: bool) -> Tensor:
    if strict and x.sum() > 1e6 and not x.isfinite().all(): raise ValueError("of no use")  # noqa: E701  # fmt: skip
    return x


def asserts(x: Tensor, strict: bool) -> Tensor:
    assert strict and x.isfinite().all(), "not finite"
    assert not x.isnan().any() or not strict
    return x


def asserts_of_numbers(x: Tensor, strict: bool) -> Tensor:
    assert torch.all(x.isfinite()).item(), "not finite"
    if strict and not bool((x < 1e6).all()):
        raise ValueError("too large")
    return x


def otherwise(x: Tensor, strict: bool) -> Tensor:
    if x.isfinite().all():
        x = 2 * x
    else:
        raise ValueError("not finite")
    return x


def continues(x: Tensor, strict: bool) -> Tensor:
    if x.isnan().any():
        raise ValueError("not a number")
    elif strict:
        x = x + 1
    return x


def returns_early(x: Tensor, strict: bool) -> Tensor:
    if x.isnan().any():
        return torch.zeros_like(x)
    return x


def computes(x: Tensor, strict: bool) -> Tensor:
    if x.sum() > 0:
        x = 2 * x
    return x


def called(x: Tensor, strict: bool) -> Tensor:
    """What is asserted is a number made of values, not a truth."""
    assert x.sum().item(), "all zeros"
    return x
