"""When a step under a plan counts as equal to one of one process: within the rounding of what it computes in.

Errors are relative to the largest element of what is compared, max|a - b| / max|b|. Where a value is mostly rounding
on one process already (against float64), a difference counts against that rounding instead.

In float32 such values are those that are zero but for rounding. In 16 bits rounding is a matter of degree: one process
is itself off by far more than a unit of rounding where sums cancel. A plan adds up in another order and rounds its
partial sums, so that it is as far off on its own; the two may be apart by both, and are given as much again. So are
the few values in float32 that cancel so far that one process is off by about the tolerance itself (the weights of a
norm before a convolution that is normalised again), up to ten tolerances: what is farther off in float64 may be so
because the model does other things there, as norms do whose epsilon is that of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.precision import Precision, autocast_dtype

# Chosen: 84 units of float32's rounding (1.2e-7), what random signs leave of it in a sum of 7000 terms.
TOLERANCE = 1e-5
# A rounding in float32 with the few operations behind it. Chosen: eight units (1.2e-7).
NOISE = 1e-6
# Both are off, each by up to twice what one process was seen to be.
# By that reasoning, see the module docstring.
APART = 4
# Of what is eased (see the module docstring). Chosen: a wrong step is off by far more.
MOST_TOLERANCES = 10
# Chosen: ten tolerances, as MOST_TOLERANCES.
MOST_OFF = 1e-4


@dataclass(frozen=True)
class Closeness:
    """``tolerance`` of an error. ``unit``: a rounding, relative. ``always``: a difference counts against one process's
    own rounding wherever that exceeds a ``unit``, not just where the value is nothing else. ``double``: values are in
    float64, and what they are in float32 tells how far off they are."""

    tolerance: float = TOLERANCE
    unit: float = NOISE
    always: bool = False
    double: bool = False

    @property
    def most_off(self) -> float:
        """How far off rounding leaves a gradient at the most, over the largest element of all gradients; one that is
        farther off in the other width was computed in another way there."""
        return math.inf if self.always else MOST_OFF

    @staticmethod
    def of(precision: Precision | None, double: bool = False) -> Closeness:
        """What is asked of a precision policy, or of a model in float64."""
        dtype = autocast_dtype(precision)
        if dtype is None:
            return Closeness(double=double)
        unit = torch.finfo(dtype).eps
        return Closeness(APART * unit, unit, always=True)

    def error(self, found: torch.Tensor, expected: torch.Tensor, off: float) -> tuple[float, bool]:
        """The error of ``found``, and whether ``expected``, which is ``off`` by that much itself, is zero but for
        rounding."""
        if not expected.numel():
            return 0.0, False
        error = float((found.double() - expected.double()).abs().max())
        size = float(expected.double().abs().max())
        # Ten times its own rounding in float32: chosen, since that is known from one sample only.
        noise = 0.0 < size <= (1 if self.always else 10) * off
        if error == 0.0:
            return 0.0, noise
        eased = min(APART * off / self.tolerance, MOST_TOLERANCES * size)
        divisor = max(size, off / self.unit if self.always or noise else eased)
        return (error / divisor if divisor else float("inf")), noise

    def loss_error(self, found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None) -> float:
        """The error of a loss, a sum that may cancel down to nothing: it counts against what rounding leaves of it on
        one process, known from its ``exact`` value in the other width, if that is more than its own size."""
        off = self.off(expected, exact)
        if self.always:
            return self.error(found, expected, off)[0]
        size = float(expected.double().abs().max()) if expected.numel() else 0.0
        if not off <= MOST_OFF * max(1.0, size):
            # The model computes something else in the other width.
            return self.error(found, expected, 0.0)[0]
        error = distance(found, expected)
        divisor = max(size, APART * off / self.tolerance)
        return 0.0 if error == 0.0 else error / divisor if divisor else math.inf

    def is_eased(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether ``found`` is farther off than the tolerance of its largest element in float32 or float64."""
        size = float(expected.double().abs().max()) if expected.numel() else 0.0
        return not self.always and distance(found, expected) > self.tolerance * size

    def off(self, value: torch.Tensor, exact: torch.Tensor | None) -> float:
        """How far a value is off by its own rounding, known from what it is in the other width; 0 if that is not
        known."""
        apart = distance(value, exact)
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if self.double else 1.0
        return apart * ratio if math.isfinite(apart) else 0.0


def distance(value: torch.Tensor, exact: torch.Tensor | None) -> float:
    """max|a - b| of a value and what it is in float64; 0 if that is not known."""
    if exact is None or not value.numel():
        return 0.0
    return float((value.double() - exact.double()).abs().max())


def rounding(values: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """The largest distance of any of ``values`` from the ``exact`` ones, relative to the largest element of each."""
    sizes = {n: float(v.abs().max()) for n, v in exact.items() if v.numel() and n in values}
    return max((distance(values[name], exact[name]) / size for name, size in sizes.items() if size), default=0.0)
