"""When a step under a plan counts as equal to one on one process: within the rounding of the dtype it computes in.

Errors are relative to the largest element of what is compared, max|a - b| / max|b|. Where a value on one process is
already mostly rounding (against float64), a difference counts against that rounding instead.

In float32 such values are those that are zero but for rounding, and those that cancel so far that much of them is. How
large it is on one process may be luck, so where that does not explain a difference, what rounding does under the plan
is measured too (:mod:`.perturbation`), and four times that is allowed of the latter. In 16 bits rounding is a matter of
degree: where sums cancel, the error of one process itself is far more than a unit of rounding. A plan adds in another
order and rounds its partial sums, so its own error is as large. The two may differ by the sum of both errors, and twice
that is allowed. The same holds for the few values in float32 that cancel so far that the error
of one process is about the tolerance itself (the weights of a norm before a convolution that is normalised again), up
to ten tolerances unless it was measured: a larger difference from float64 may have another cause, since some models
compute something else there, such as norms whose epsilon is that of the dtype. What rounding moves is none of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from autopar.precision import Precision, autocast_dtype

# Chosen: 84 units of float32's rounding (1.2e-7), what random signs leave of it in a sum of 7000 terms.
TOLERANCE = 1e-5
# A rounding in float32 with the few operations behind it. Chosen: eight units (1.2e-7).
NOISE = 1e-6
# Both have an error, each up to twice the one measured on one process; see the module docstring.
APART = 4
# As APART, of models whose parameters are in 16 bits: so are their gradients, and all sums between layers and ranks.
# Chosen: twice as many roundings. Of a transformer in bf16, gradients of norms differ by 4.4 units.
STORED = 8
# The limit of eased errors (see the module docstring). Chosen: the error of a wrong step is far larger.
MOST_TOLERANCES = 10
# What is at most so many times its own rounding is zero but for rounding, in float32 and float64. Chosen: ten, since
# rounding is known from one sample only.
MOST_OF_NOISE = 10
# The share of what is more than rounding that rounding may move it by, as measured: what is lost or counted twice is an
# error. Chosen: of 624 gradients of tests/verification/test_cancelling.py, one right one is farther off (at 0.1, 42
# are), and none passes that is zero, doubled, or has lost half of an element (at 0.5, 130 do of the latter).
MOST_MOVED = 0.3
# Chosen: ten tolerances, as MOST_TOLERANCES.
LARGEST_OWN_ERROR = 1e-4


@dataclass(frozen=True)
class Closeness:
    """The ``tolerance`` of an error. ``unit``: a unit of rounding, relative. ``always``: a difference counts against
    one process's own rounding wherever that exceeds a ``unit``, not just where the value is nothing but rounding.
    ``double``: values are in float64, and their difference from float32 tells their rounding error."""

    tolerance: float = TOLERANCE
    unit: float = NOISE
    always: bool = False
    double: bool = False

    @property
    def ulp(self) -> float:
        """A unit of rounding of the dtype, relative."""
        return self.unit if self.always else torch.finfo(torch.float64 if self.double else torch.float32).eps

    @property
    def largest_own_error(self) -> float:
        """The largest error of a gradient that rounding explains, over the largest element of all gradients; where the
        difference from the other width is larger, the model computes something else there."""
        return math.inf if self.always else LARGEST_OWN_ERROR

    @staticmethod
    def of(precision: Precision | None, dtypes: Collection[torch.dtype] = ()) -> Closeness:
        """The closeness required under a precision policy, of a model whose floating-point parameters have ``dtypes``.
        The coarsest of all decides, as what passes through it is rounded to it."""
        cast = autocast_dtype(precision)
        stored = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        unit = max(stored, torch.finfo(cast).eps if cast else 0.0)
        if unit <= torch.finfo(torch.float32).eps:
            return Closeness(double=set(dtypes) == {torch.float64})
        return Closeness((STORED if stored == unit else APART) * unit, unit, always=True)

    def error(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        own_error: float,
        exact: torch.Tensor | None = None,
        moved: float = 0.0,
    ) -> tuple[float, bool]:
        """The error of ``actual``, which rounding moves by ``moved``, as far as that was measured, and whether
        ``expected``, whose own error is ``own_error``, is zero but for rounding (as :meth:`is_noise`)."""
        if not expected.numel():
            return 0.0, False
        error = float((actual.double() - expected.double()).abs().max())
        size = largest(expected)
        either = max(own_error, moved)
        noise = either > 0.0 and self.is_noise(expected, exact, own_error)
        if error == 0.0:
            return 0.0, noise
        measured = min(APART * moved, MOST_MOVED * size) / self.tolerance
        eased = max(min(APART * own_error / self.tolerance, MOST_TOLERANCES * size), measured)
        divisor = max(size, either / self.unit if self.always or noise else eased)
        return (error / divisor if divisor else float("inf")), noise

    def is_noise(self, value: torch.Tensor, exact: torch.Tensor | None, own_error: float) -> bool:
        """Whether a ``value`` with ``own_error`` is zero but for rounding. In float32 and float64: whether a tenth of
        it or more is rounding. In 16 bits, where that is so of values that merely cancel too: whether its ``exact``
        value in float64 is at most that error."""
        if self.always:
            return exact is not None and largest(exact) <= own_error
        return largest(value) <= MOST_OF_NOISE * own_error

    def in_doubt(
        self, actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None, own_error: float
    ) -> bool:
        """Whether a difference may be rounding, of which ``own_error`` on one process is one sample: where one process
        has nothing else, or in float32 and float64 where the difference is within reach of that sample."""
        if exact is None or exact.shape != expected.shape:
            return False
        near = not self.always and distance(actual, expected) <= MOST_OF_NOISE * APART * own_error
        return near or self.is_noise(expected, exact, own_error)

    def loss_error(self, actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None) -> float:
        """The error of a loss. A loss is a sum that may cancel to almost nothing, so its difference counts against the
        rounding error of one process, known from the ``exact`` value in the other width, if that is more than the
        loss's size."""
        own_error = self.rounding_error(expected, exact)
        if self.always:
            return self.error(actual, expected, own_error)[0]
        size = largest(expected)
        if not own_error <= LARGEST_OWN_ERROR * max(1.0, size):
            # The model computes something else in the other width.
            return self.error(actual, expected, 0.0)[0]
        error = distance(actual, expected)
        divisor = max(size, APART * own_error / self.tolerance)
        return 0.0 if error == 0.0 else error / divisor if divisor else math.inf

    def is_eased(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether ``actual`` differs by more than the tolerance of its largest element, in float32 or float64."""
        size = largest(expected)
        return not self.always and distance(actual, expected) > self.tolerance * size

    def rounding_error(self, value: torch.Tensor, exact: torch.Tensor | None) -> float:
        """The rounding error of a value, from its ``exact`` value in the other width; 0 if that is unknown."""
        apart = distance(value, exact)
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if self.double else 1.0
        return apart * ratio if math.isfinite(apart) else 0.0


def finite(moved: Mapping[str, float] | None) -> dict[str, float]:
    """How far rounding moves values, where that was measured: infinity and NaN, where ranks disagreed, measure
    nothing."""
    return {name: far for name, far in (moved or {}).items() if math.isfinite(far)}


def largest(value: torch.Tensor) -> float:
    """The largest element of a ``value`` of any dtype and shape, without signs; 0 if it has none."""
    return float(value.double().abs().max()) if value.numel() else 0.0


def distance(value: torch.Tensor, exact: torch.Tensor | None) -> float:
    """max|a - b| of a value and its ``exact`` value in float64; 0 if that is unknown."""
    if exact is None or not value.numel():
        return 0.0
    return float((value.double() - exact.double()).abs().max())


def rounding(values: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """The largest distance of any of ``values`` from its ``exact`` value, relative to the largest element of each."""
    sizes = {n: float(v.abs().max()) for n, v in exact.items() if v.numel() and n in values}
    return max((distance(values[name], exact[name]) / size for name, size in sizes.items() if size), default=0.0)
