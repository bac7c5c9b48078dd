"""Windows against brute force, and the same as rows of the integer program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.solver.budget import Budget
from autopar.solver.coordinate_descent import Neighbourhood, _Overlap, polish
from autopar.solver.highs import Effort, run
from autopar.solver.lp_relaxation import round_up
from autopar.solver.milp import build
from autopar.solver.named_export import export
from autopar.solver.overlap_prices import LEAST_PRICE, _PriceSearch, at_prices
from autopar.solver.problem import Group, Problem, Transfer, Window, evaluate, is_within, sides_of
from autopar.solver.solve import solve
from tests.solver.test_solve import assignments, brute_force, forbid, random_problem

seeds = st.integers(0, 2**32 - 1)


def with_windows(seed: int, limited: bool = True) -> Problem:
    """A random problem with two windows, which may share groups and transfers: each has a part of their cost."""
    problem, random = random_problem(seed, limited=limited), np.random.default_rng(seed)

    def divided(count: int) -> list[dict[int, float]]:
        """For each window the parts of ``count`` things that belong to it, at most 1 in sum; most of one alone."""
        owner, part = random.integers(0, 4, count), random.choice([0.25, 0.5], count)
        first = np.select([owner == 0, owner == 3], [1.0, part])
        second = np.select([owner == 1, owner == 3], [1.0, 1.0 - part])
        return [{int(i): float(parts[i]) for i in np.flatnonzero(parts)} for parts in (first, second)]

    groups, transfers = divided(len(problem.groups)), divided(len(problem.transfers))
    shares = random.choice([0.3, 0.9, 1.0], 2)
    windows = (Window(f"w{w}", groups[w], transfers[w], float(shares[w])) for w in range(2))
    return replace(problem, windows=tuple(windows))


@settings(max_examples=100, deadline=None)
@given(seeds, st.booleans())
def test_solve_finds_what_brute_force_finds(seed: int, limited: bool) -> None:
    problem = with_windows(seed, limited)
    best = brute_force(problem)
    solution = solve(problem, gap=0.0)
    if np.isinf(best):
        assert solution.status == "infeasible"
        return
    assert solution.objective == evaluate(problem, solution.choices)
    assert solution.bound <= best * (1 + 1e-6) + 1e-12
    assert solution.objective == pytest.approx(best, rel=1e-4, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.01, 0.2]))
def test_bound_and_gap_are_honest(seed: int, gap: float) -> None:
    problem = with_windows(seed)
    best, solution = brute_force(problem), solve(problem, gap=gap)
    if np.isfinite(best):
        assert solution.bound <= best * (1 + 1e-6) + 1e-12 <= solution.objective * (1 + 2e-6) + 2e-12
        assert solution.status == "optimal" or solution.gap > gap


@settings(max_examples=40, deadline=None)
@given(seeds)
@example(86)
def test_the_program_has_windows_as_linear_rows(seed: int) -> None:
    problem = forbid(with_windows(seed))
    if problem is None:
        return
    program = build(problem)
    best, outcome = brute_force(problem), run(program, False, Effort(10.0))
    if np.isfinite(best):
        # Of microseconds, too: the rows are not in seconds, of which the solver's tolerance is a millionth.
        assert outcome.bound == pytest.approx(best, rel=1e-5, abs=1e-12)
        assert evaluate(problem, round_up(problem, program, outcome)) == pytest.approx(best, rel=1e-5, abs=1e-12)
    names = list(export(problem).linear_constraints.names)
    assert {"exposed[w0]", "exposed[w1]"} <= set(names)


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_any_prices_bound_every_assignment(seed: int, one: float, other: float) -> None:
    problem = with_windows(seed)
    plain = at_prices(problem, (one, other))
    for choices in assignments(problem):
        true = evaluate(problem, choices)
        if np.isfinite(true):
            assert evaluate(plain, choices) <= true * (1 + 1e-9) + 1e-12
            sides = [sides_of(problem, window, choices) for window in problem.windows]
            ends = tuple(1.0 if messages > computing else 0.0 for messages, computing in sides)
            assert evaluate(at_prices(problem, ends), choices) == pytest.approx(true, rel=1e-9, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_descent_sees_what_hides(seed: int) -> None:
    problem = with_windows(seed)
    neighbourhood = Neighbourhood.of(problem)
    for choices in [c for c in assignments(problem)[::11] if np.isfinite(evaluate(problem, c))]:
        overlap, now = _Overlap.of(neighbourhood, choices), evaluate(problem, choices)
        for index in range(len(problem.groups)):
            costs = overlap.costs(choices, index)
            for k in range(len(costs)):
                change = evaluate(problem, np.concatenate([choices[:index], [k], choices[index + 1 :]])) - now
                if np.isfinite(change):
                    assert costs[k] - costs[choices[index]] == pytest.approx(change, abs=1e-9)
        if is_within(problem, choices):
            better = polish(neighbourhood, choices)
            assert is_within(problem, better) and evaluate(problem, better) <= now + 1e-12


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_the_next_prices_are_where_the_known_assignments_cost_most(seed: int) -> None:
    problem = with_windows(seed, limited=False)
    search, random = _PriceSearch(problem), np.random.default_rng(seed)
    for choices in assignments(problem)[::5]:
        search.offer(np.asarray(choices, dtype=np.int64))
    if not search.cuts:
        return
    cuts = np.array(search.cuts)
    prices, most = search.highest(Budget(10.0))
    assert (cuts @ [1.0, *prices]).min() == pytest.approx(most, rel=1e-5, abs=1e-9)
    for other in random.uniform(LEAST_PRICE, 1.0, (20, 2)):
        assert (cuts @ [1.0, *other]).min() <= most + 1e-5 * abs(most) + 1e-9


@pytest.mark.parametrize("limit", [np.inf, 1.0])
def test_rounding_is_no_reason_to_send_more(limit: float) -> None:
    """Beside 0.2 s that hide, 0.1 s more hide as well: their sum, 0.3 s and a rounding error, seems to hide more."""
    one, two = np.zeros(1), np.zeros(2)
    first, ends = np.zeros(1, dtype=np.int64), np.arange(2)
    computing = Group("a", np.array([0.4]), one, one, one)
    groups = (computing, Group("b", one, one, one, one), Group("c", two, two, two, two))
    transfers = (
        Transfer("needed", 0, first, (1,), (first,), np.array([[0.2]])),
        Transfer("needless", 0, first, (2,), (ends,), np.array([[0.0, 0.1]])),
    )
    problem = Problem(groups, transfers, limit, windows=(Window("w", {0: 1.0}, {0: 1.0, 1: 1.0}, 1.0),))
    silent, sending = np.array([0, 0, 0]), np.array([0, 0, 1])
    overlap = _Overlap.of(Neighbourhood.of(problem), silent)
    costs = overlap.costs(silent, 2)
    assert costs[1] < costs[0] and overlap.best(costs, 0) == 0
    assert (polish(Neighbourhood.of(problem), silent) == silent).all()
    search = _PriceSearch(problem)
    search.offer(silent)
    search.offer(sending)
    assert evaluate(problem, sending) < evaluate(problem, silent) and (search.choices == silent).all()


def test_the_next_prices_are_sought_in_counted_work() -> None:
    problem = with_windows(3, limited=False)
    search, budget = _PriceSearch(problem), Budget(1.0, counted=True)
    for choices in assignments(problem)[::5]:
        search.offer(np.asarray(choices, dtype=np.int64))
    prices, _ = search.highest(budget)
    assert 0.0 < budget.spent < 0.1
    assert search.highest(Budget(1.0, counted=True, spent=0.5))[0] == prices
    assert search.highest(Budget(1.0, counted=True, spent=1.0)) == ([LEAST_PRICE] * 2, search.bound)
