"""Fits rates of links to measurements of collectives: least squares of relative errors over sizes of messages and of
groups, of the formula with which plans are priced (:mod:`autopar.cost.collective.collective`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.cluster.links import Rate
from autopar.cost.collective.algorithms import steps, traffic
from autopar.solver.problem import Floats

from .relative_least_squares import nonnegative_fit
from .samples import CollectiveSample

# A richer model must reduce the relative error by more than this, or it fits rounding.
# Chosen: far below the 10 to 35% that remain (docs/cost-model.md, `local`).
TOLERANCE = 0.005


def relative_error(predicted: Floats, seconds: Floats) -> float:
    """Root mean square of the relative errors."""
    return float(np.sqrt(np.mean(np.square(predicted / seconds - 1.0))))


def _fit_lines(samples: Sequence[CollectiveSample], growth: float) -> tuple[tuple[Rate, ...], float]:
    """Fits rates of that growth: one line, or two if a bend between message sizes reduces the error by a quarter."""
    moved = [traffic(s.kind, s.members) * s.nbytes for s in samples]
    features = np.array([[steps(s.kind, s.members, growth) for s in samples], moved]).T
    seconds, nbytes = np.array([s.seconds for s in samples]), np.array([s.nbytes for s in samples])
    lines = [nonnegative_fit(features, seconds)]
    error = relative_error(features @ lines[0], seconds)
    for knee in sorted(set(nbytes))[2:-1]:
        pair = [nonnegative_fit(features[side], seconds[side]) for side in (nbytes < knee, nbytes >= knee)]
        pair_error = relative_error(np.max([features @ line for line in pair], axis=0), seconds)
        # A quarter: chosen, since any two lines fit better than one.
        if pair_error < 0.75 * error - TOLERANCE:
            lines, error = pair, pair_error
    return tuple(Rate(float(a), 1.0 / float(b) if b > 0 else math.inf, growth) for a, b in lines), error


def fit_rates(samples: Sequence[CollectiveSample]) -> tuple[tuple[Rate, ...], float]:
    """Fits the rates of one kind of collective. Returns them and the remaining relative error. A growth above 1 must
    reduce the error by a tenth per step of a half."""
    rates, error = _fit_lines(samples, 1.0)
    threshold = 0.9 * error - TOLERANCE
    # Four processes on two cores had 3 to 4 (docs/cost-model.md, "Growth").
    for growth in np.arange(1.5, 5.0, 0.5):
        candidates, candidate_error = _fit_lines(samples, float(growth))
        if candidate_error < threshold:
            rates, error, threshold = candidates, candidate_error, 0.9 * candidate_error - TOLERANCE
    return rates, error
