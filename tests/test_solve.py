"""The solver against brute force, and what it promises about status, bound and memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.problem import Group, Ints, Problem, Transfer, evaluate, memory_of
from autopar.solve import smallest_memory, solve


def random_problem(seed: int, groups: int = 5, choices: int = 3, limited: bool = True) -> Problem:
    """A small problem with shared and parallel transfers, self transfers, forbidden entries, ties and a memory limit."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, choices + 1, groups)
    scale = random.choice([1.0, 1e-5])

    forbid = random.choice([0.0, 0.0, 0.1])

    def prices(*shape: int) -> np.ndarray:
        drawn = (
            random.integers(0, 6, shape) * scale if random.random() < 0.5 else random.random(shape) * scale
        )
        return np.where(random.random(shape) < forbid, np.inf, drawn.astype(float))

    def make(i: int, size: int) -> Group:
        plain = random.random() < 0.3
        memory = np.zeros(size) if plain else random.integers(0, 5, size).astype(float)
        temporary = np.zeros(size) if plain else random.integers(0, 5, size).astype(float)
        return Group(f"g{i}", prices(size), memory, temporary)

    made = tuple(make(i, int(size)) for i, size in enumerate(sizes))
    transfers = []
    for t in range(int(random.integers(0, 2 * groups))):
        producer, rows, columns = (
            int(random.integers(groups)),
            int(random.integers(1, 4)),
            int(random.integers(1, 4)),
        )
        consumers = tuple(int(c) for c in random.integers(0, groups, random.integers(1, 4)))
        source = random.integers(0, rows, sizes[producer])
        targets = tuple(random.integers(0, columns, sizes[c]) for c in consumers)
        cost = prices(rows, columns)
        transfers.append(Transfer(f"t{t}", producer, source, consumers, targets, cost))
    limit = float(random.integers(groups, 5 * groups)) if limited else float("inf")
    return Problem(made, tuple(transfers), limit, float(random.integers(0, 3)))


def assignments(problem: Problem) -> list[Ints]:
    return [
        np.array(c, dtype=np.int64) for c in itertools.product(*(range(len(g.cost)) for g in problem.groups))
    ]


def brute_force(problem: Problem) -> float:
    """The optimum by trying everything; infinite if nothing fits."""
    allowed = (c for c in assignments(problem) if memory_of(problem, c) <= problem.memory_limit)
    return min((evaluate(problem, c) for c in allowed), default=float("inf"))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_solve_finds_what_brute_force_finds(seed: int, limited: bool) -> None:
    problem = random_problem(seed, limited=limited)
    best = brute_force(problem)
    solution = solve(problem, gap=0.0)
    if np.isinf(best):
        assert solution.status == "infeasible" and len(solution.choices) == 0
        return
    assert solution.status == "optimal"
    assert solution.objective == evaluate(problem, solution.choices)
    assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert memory_of(problem, solution.choices) <= problem.memory_limit
    assert solution.bound <= best * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.05, 0.5]))
def test_bound_and_gap_are_honest(seed: int, gap: float) -> None:
    problem = random_problem(seed, groups=6, choices=3)
    best = brute_force(problem)
    solution = solve(problem, gap=gap)
    if np.isfinite(best):
        assert solution.bound <= best * (1 + 1e-6) + 1e-12 <= solution.objective * (1 + 2e-6) + 2e-12
        assert solution.status == "optimal" and solution.gap <= max(gap, 1e-6) or solution.objective == 0


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_smallest_memory_is_the_least_of_all_finite_assignments(seed: int) -> None:
    problem = random_problem(seed)
    finite = [memory_of(problem, c) for c in assignments(problem) if np.isfinite(evaluate(problem, c))]
    assert smallest_memory(problem) == min(finite, default=float("inf"))
