"""Fits the parameters of formulas to measurements, by relative errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from autopar.solver.problem import Floats

Model = Callable[[Floats], Floats]


def least_error(model: Model, seconds: Floats, start: Sequence[float], steps: int = 200) -> tuple[Floats, float]:
    """Positive parameters near ``start`` with which ``model`` comes closest to the measured ``seconds``, and the mean
    absolute relative error.

    Gauss-Newton with damping (Levenberg 1944, Marquardt 1963) on logarithms of parameters and of seconds. Weights turn
    squares into absolute values, so that single disturbed measurements do not distort the fit.
    """
    point, damping = np.log(np.array(start)), 1e-2
    residual = np.log(model(np.exp(point)) / seconds)
    for _ in range(steps):
        moved = [np.log(model(np.exp(point + 1e-5 * unit)) / seconds) for unit in np.eye(len(point))]
        slopes = (np.array(moved).T - residual[:, None]) / 1e-5
        # Errors below 5% count as squares: chosen, so that measurements that fit by chance do not dominate.
        weights = 1.0 / np.maximum(np.abs(residual), 0.05)
        normal = slopes.T @ (weights[:, None] * slopes)
        step = np.linalg.solve(normal + np.diag(damping * np.diag(normal) + 1e-9), -slopes.T @ (weights * residual))
        candidate = np.clip(point + step, -40, 40)
        candidate_residual = np.log(model(np.exp(candidate)) / seconds)
        if np.abs(candidate_residual).sum() < np.abs(residual).sum():
            point, residual, damping = candidate, candidate_residual, damping / 2
        else:
            damping = min(3 * damping, 1e6)
    return np.exp(point), float(np.mean(np.abs(np.exp(residual) - 1)))


def nonnegative_fit(features: Floats, seconds: Floats) -> Floats:
    """Weights >= 0 of the columns of ``features`` [samples, columns] with the least sum of squared relative errors: the
    best unconstrained fit on any subset of columns that has no negative weight. There must be few columns."""
    scaled, ones = features / seconds[:, None], np.ones(len(seconds))
    columns = range(features.shape[1])
    best, least = np.zeros(len(columns)), float(len(seconds))
    for used in itertools.chain.from_iterable(itertools.combinations(columns, n) for n in range(1, len(columns) + 1)):
        weights = np.linalg.lstsq(scaled[:, used], ones, rcond=None)[0]
        error = float(np.square(scaled[:, used] @ weights - 1.0).sum())
        if (weights >= 0).all() and error < least:
            best, least = np.zeros(len(columns)), error
            best[list(used)] = weights
    return best
