"""Compares every gradient of a step under a plan with that of one process, and names those that are nothing but
rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .tolerance import Closeness, distance, finite, largest

Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Noise:
    """A gradient that is zero but for rounding on one process.

    Attributes:
        alone, planned: its largest element on one process and under the plan.
        moved: by how much its elements under the plan differ, at most, when parameters and inputs are changed by a unit
            of rounding; None if that was not needed.
    """

    alone: float
    planned: float
    moved: float | None = None

    def __str__(self) -> str:
        moved = "" if self.moved is None else f", moved {self.moved:.1e} by a unit of rounding"
        return f"{self.alone:8.1e} {self.planned:8.1e}{moved}"


@dataclass(frozen=True)
class Comparison:
    """``errors`` by gradient; those that are ``noise`` on one process; those that are zeros under the plan and None on
    one process (``unset``); and those that are too far apart, though by no more than rounding may do (``doubtful``)."""

    errors: dict[str, float] = field(default_factory=dict)
    noise: dict[str, Noise] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()


def compare(
    actual: Gradients,
    reference: Gradients,
    exact: Gradients | None,
    closeness: Closeness,
    moved: Mapping[str, float] | None = None,
) -> Comparison:
    """Compares gradients under a plan with those of the ``reference``, one process; ``exact`` are the latter in the
    other floating-point width. ``moved``: how far rounding alone moves those under the plan, where it was measured
    (:mod:`.perturbation`)."""
    measured = finite(moved)
    most = max(map(largest, reference.values()), default=0.0)
    result, unset, doubtful = Comparison(), [], []
    for name in sorted({*actual, *reference}):
        gradient, expected = actual.get(name), reference.get(name)
        if gradient is not None and expected is None and not gradient.any():
            result.errors[name] = 0.0
            unset.append(name)
        elif gradient is None or expected is None or gradient.shape != expected.shape:
            result.errors[name] = math.inf
        else:
            precise = exact.get(name) if exact else None
            one = _Pair(gradient, expected, precise, most, closeness)
            far = measured.get(name) if one.may_be_rounding else None
            result.errors[name], is_noise = closeness.error(gradient, expected, one.own_error, precise, far or 0.0)
            if is_noise:
                result.noise[name] = Noise(largest(expected), largest(gradient), far)
            if one.may_be_rounding and not result.errors[name] <= closeness.tolerance:
                doubtful.append(name)
    return Comparison(result.errors, result.noise, tuple(unset), tuple(doubtful))


@dataclass(frozen=True)
class _Pair:
    """A gradient under a plan, and on one process in both widths; ``largest``: the largest element of all gradients."""

    gradient: torch.Tensor
    expected: torch.Tensor
    exact: torch.Tensor | None
    largest: float
    closeness: Closeness

    @property
    def own_error(self) -> float:
        """The rounding error of one process, as far as it is known."""
        own = self.closeness.rounding_error(self.expected, self.exact)
        return own if own <= self.closeness.largest_own_error * self.largest else 0.0

    @property
    def is_small(self) -> bool:
        """Whether the two differ by less than the tolerance of the largest gradient. What rounding in one gradient does
        is no more than that, since all are computed from the same few values."""
        return distance(self.gradient, self.expected) <= self.closeness.tolerance * self.largest

    @property
    def may_be_rounding(self) -> bool:
        """Whether the two differ by no more than rounding could explain, of which one sample is known."""
        return self.is_small and self.closeness.in_doubt(self.gradient, self.expected, self.exact, self.own_error)
