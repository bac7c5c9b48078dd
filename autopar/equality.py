"""When a step under a plan counts as equal to one of one process: within the rounding of what it computes in.

Errors are relative to the largest element of what is compared, max|a - b| / max|b|. Where a value is mostly rounding
on one process already (against float64), a difference counts against that rounding instead.

In float32 such values are those that are zero but for rounding. In 16 bits rounding is a matter of degree: one process
is itself off by far more than a unit of rounding where sums cancel. A plan adds up in another order and rounds its
partial sums, so that it is as far off on its own; the two may be apart by both, and are given as much again. So are
the few values in float32 that cancel so far that one process is off by about the tolerance itself: the weights of a
norm before a convolution that is normalised again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .precision import Precision, autocast_dtype

TOLERANCE = 1e-5
NOISE = 1e-6
# Both are off, each by up to twice what one process was seen to be.
APART = 4


@dataclass(frozen=True)
class Closeness:
    """``tolerance`` of an error. ``unit``: a rounding, relative. ``always``: a difference counts against one process's
    own rounding wherever that exceeds a ``unit``, not just where the value is nothing else."""

    tolerance: float = TOLERANCE
    unit: float = NOISE
    always: bool = False

    @staticmethod
    def of(precision: Precision | None) -> Closeness:
        """What is asked of a precision policy."""
        dtype = autocast_dtype(precision)
        if dtype is None:
            return Closeness()
        unit = torch.finfo(dtype).eps
        return Closeness(APART * unit, unit, always=True)

    def error(self, found: torch.Tensor, expected: torch.Tensor, off: float) -> tuple[float, bool]:
        """The error of ``found``, and whether ``expected``, which is ``off`` by that much itself, is zero but for
        rounding."""
        if not expected.numel():
            return 0.0, False
        error = float((found.double() - expected.double()).abs().max())
        size = float(expected.double().abs().max())
        noise = 0.0 < size <= (1 if self.always else 10) * off
        if error == 0.0:
            return 0.0, noise
        divisor = max(size, off / self.unit if self.always or noise else APART * off / self.tolerance)
        return (error / divisor if divisor else float("inf")), noise


def distance(value: torch.Tensor, exact: torch.Tensor | None) -> float:
    """max|a - b| of a value and what it is in float64; 0 if that is not known. Of a value in float64 ``exact`` is what
    it is in float32, which is farther off by the ratio of their roundings."""
    if exact is None or not value.numel():
        return 0.0
    apart = float((value.double() - exact.double()).abs().max())
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return apart * ratio if (value.dtype, exact.dtype) == (torch.float64, torch.float32) else apart


def rounding(values: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """The largest distance of any of ``values`` from the ``exact`` ones, relative to the largest element of each."""
    sizes = {n: float(v.abs().max()) for n, v in exact.items() if v.numel() and n in values}
    return max((distance(values[name], exact[name]) / size for name, size in sizes.items() if size), default=0.0)
