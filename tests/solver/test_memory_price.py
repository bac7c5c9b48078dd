"""What a byte of the device's memory is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.memory_price import price_between
from autopar.solver.problem import Group, Problem
from autopar.solver.solve import solve


def problem(limit: float) -> Problem:
    """Twelve tensors that take 4 bytes, or as many seconds as they have a number."""
    groups = (Group(f"g{i}", np.array([0.0, i]), np.array([4.0, 0.0]), np.zeros(2), np.zeros(2)) for i in range(1, 13))
    return Problem(tuple(groups), (), memory_limit=limit)


def chosen(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The first ``count`` tensors are not kept."""
    return (np.arange(12) < count).astype(np.int64)


def test_the_price_is_that_of_the_lowest_line_across_the_limit() -> None:
    known = [chosen(count) for count in (0, 3, 6, 12)]
    # From 36 bytes (6 s) to 24 bytes (21 s).
    assert price_between(problem(30.0), known) == pytest.approx(15 / 12)
    assert price_between(problem(30.0), [chosen(0), chosen(12)]) == pytest.approx(78 / 48)


@pytest.mark.parametrize("known", [(), (0,), (12,), (6, 12)])
def test_without_a_line_across_the_limit_no_price_is_known(known: tuple[int, ...]) -> None:
    assert price_between(problem(30.0), [chosen(count) for count in known]) == 0.0
    assert price_between(problem(np.inf), [chosen(0), chosen(12)]) == 0.0


@pytest.mark.parametrize("price", [0.0, 1e-3, 1.5, 1e3])
def test_wherever_the_search_for_a_price_begins_the_best_is_found(price: float) -> None:
    found = solve(replace(problem(30.0), memory_price=price), gap=0.0, counted=True)
    assert found.status == "optimal" and found.objective == sum(range(1, 6))


def test_a_solution_tells_the_price_of_its_bound() -> None:
    """By which it holds for other limits, too."""
    found = solve(problem(30.0), gap=0.2, counted=True)
    if found.memory_price:
        for limit in (10.0, 20.0, 40.0):
            best = solve(problem(limit), gap=0.0, counted=True).objective
            assert found.bound - found.memory_price * (limit - 30.0) <= best + 1e-9
