"""Reductions that no limit of the device's memory changes are made once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import shared_reductions
from autopar.solver.problem import Problem, evaluate, is_within
from autopar.solver.reduce import ReducedForAnyLimit, is_impossible
from autopar.solver.shared_reductions import SharedReductions
from autopar.solver.solve import solve
from tests.solver.test_solve import assignments, brute_force, random_problem


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(0.0, 2.0))
def test_reduced_for_any_limit_a_problem_keeps_its_optimum_within_each(seed: int, hosted: bool, share: float) -> None:
    problem = random_problem(seed, groups=4, hosted=hosted)
    most = sum(float(group.memory.max() + group.temporary.max()) for group in problem.groups)
    limited = replace(problem, memory_limit=problem.memory_fixed + share * most)
    known = ReducedForAnyLimit.of(problem)
    known.within(1.01 * limited.memory_limit)  # Another limit before changes nothing.
    smaller, chain = known.within(limited.memory_limit)
    best = brute_force(limited)
    if is_impossible(smaller):
        assert np.isinf(best)
        return
    offset = known.chain.offset + chain.offset
    assert brute_force(smaller) + offset == pytest.approx(best, rel=1e-9, abs=1e-12)
    for choices in assignments(smaller):
        full = known.chain.expand(chain.expand(choices))
        assert evaluate(limited, full) == pytest.approx(evaluate(smaller, choices) + offset, rel=1e-9, abs=1e-12)
        assert is_within(limited, full) == is_within(smaller, choices)


def feasible() -> Problem:
    """A problem whose least memory is known."""
    problems = (random_problem(seed, groups=6) for seed in range(100))
    return next(problem for problem in problems if np.isfinite(brute_force(problem)))


def test_two_limits_share_reductions_and_find_what_each_finds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[Problem](), ReducedForAnyLimit.of

    def counted(problem: Problem) -> ReducedForAnyLimit:
        made.append(problem)
        return make(problem)

    problem, known = feasible(), SharedReductions()
    limits = [problem.memory_limit * part for part in (1.0, 1.05, 1.3)]
    problems = [replace(problem, memory_limit=limit) for limit in limits]
    alone = [solve(each, counted=True) for each in problems]
    monkeypatch.setattr(shared_reductions.ReducedForAnyLimit, "of", staticmethod(counted))
    together = [solve(each, counted=True, reductions=known) for each in problems]
    assert len(made) == 1
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one.choices, other.choices)
        assert (one.objective, one.bound, one.seconds) == (other.objective, other.bound, other.seconds)
    heavier = replace(problem.groups[0], memory=problem.groups[0].memory + 1.0)
    solve(replace(problem, groups=(heavier, *problem.groups[1:])), counted=True, reductions=known)
    assert len(made) == 2, "the bytes of a choice are another's"


def test_as_many_are_kept_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reductions, "KEPT_PAIRS", 0)
    known = SharedReductions()
    for seed in range(3):
        known.reduce(replace(random_problem(seed), memory_limit=1e9))
    assert len(known._known) == 1
