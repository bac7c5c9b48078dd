"""Every reduction keeps the optimum, and its inverse says exactly by how much objectives differ."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.budget import Budget
from autopar.solver.coordinate_descent import Neighbourhood, fits, polish, repair, smallest
from autopar.solver.lp_relaxation import relax
from autopar.solver.message_passing import Messages
from autopar.solver.problem import Floats, Group, Ints, Problem, Transfer, evaluate, is_within, memory_of
from autopar.solver.reduce import (
    DropDominated,
    EliminateGroups,
    Reduction,
    SimplifyTransfers,
    is_impossible,
    reduce,
    reductions,
)
from tests.solver.test_solve import assignments, brute_force, random_problem

Seeds = st.integers(0, 2**32 - 1)
DISTINCT = tuple({type(r): r for r in reductions()}.values())


@pytest.mark.parametrize("reduction", DISTINCT, ids=lambda r: r.name)
@settings(max_examples=150, deadline=None)
@given(seed=Seeds, hosted=st.booleans())
def test_a_reduction_keeps_the_optimum(reduction: Reduction, seed: int, hosted: bool) -> None:
    problem = random_problem(seed, groups=4, hosted=hosted)
    smaller, inverse = reduction.apply(problem)
    best = brute_force(problem)
    if is_impossible(smaller):
        assert np.isinf(best)
        return
    assert brute_force(smaller) + inverse.offset == pytest.approx(best, rel=1e-9, abs=1e-12)
    for choices in assignments(smaller):
        full = inverse.expand(choices)
        expected = evaluate(smaller, choices) + inverse.offset
        assert evaluate(problem, full) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert is_within(problem, full) == is_within(smaller, choices)


@settings(max_examples=200, deadline=None)
@given(Seeds, st.booleans())
def test_the_whole_chain_keeps_the_optimum_and_restricts_known_choices(seed: int, hosted: bool) -> None:
    problem = random_problem(seed, hosted=hosted)
    smaller, chain = reduce(problem)
    best = brute_force(problem)
    if is_impossible(smaller):
        assert np.isinf(best)
        return
    assert brute_force(smaller) + chain.offset == pytest.approx(best, rel=1e-9, abs=1e-12)
    for choices in assignments(problem):
        restricted = chain.restrict(choices)
        if restricted is not None and is_within(problem, choices):
            # Dominating choices replace dominated ones, and eliminated groups choose best: never worse.
            reached = evaluate(smaller, restricted) + chain.offset
            assert reached <= evaluate(problem, choices) * (1 + 1e-9) + 1e-12


def arrays_of(problem: Problem) -> list[Floats | Ints]:
    groups: list[Floats | Ints] = [array for g in problem.groups for array in (g.cost, g.memory, g.temporary, g.host)]
    return groups + [array for t in problem.transfers for array in (t.source, *t.targets, t.cost)]


@settings(max_examples=60, deadline=None)
@given(Seeds, st.booleans())
def test_what_was_settled_need_not_be_looked_at_again(seed: int, hosted: bool) -> None:
    """Rounds that remember come to what rounds that look at everything do, and write to no array they were given."""
    problem = random_problem(seed, hosted=hosted)
    before = [array.copy() for array in arrays_of(problem)]
    found, _ = reduce(problem)
    assert all(np.array_equal(old, new) for old, new in zip(before, arrays_of(problem), strict=True))
    expected = problem
    for _ in range(8):
        for reduction in reductions():
            expected, _ = reduction.apply(expected)
            if is_impossible(expected):
                assert is_impossible(found)
                return
    assert len(arrays_of(found)) == len(arrays_of(expected))
    assert all(np.array_equal(a, b) for a, b in zip(arrays_of(found), arrays_of(expected), strict=True))


def test_a_reduction_leaves_what_it_has_settled_as_it_is() -> None:
    """The very same arrays, or the next round would look at all of them again."""
    reduced = [reduce(random_problem(seed, groups=6))[0] for seed in range(40)]
    left = [problem for problem in reduced if problem.transfers and not is_impossible(problem)]
    assert left
    for problem in left:
        again, _ = reduce(problem)
        assert all(old is new for old, new in zip(arrays_of(problem), arrays_of(again), strict=True))


def free_group(name: str, cost: Floats) -> Group:
    """A group that takes no memory."""
    return Group(name, cost, *(np.zeros_like(cost),) * 3)


def chain_problem(length: int, choices: int = 5, seed: int = 0) -> Problem:
    random = np.random.default_rng(seed)
    groups = tuple(free_group(f"g{i}", random.random(choices)) for i in range(length))
    label = np.arange(choices)
    transfers = tuple(
        Transfer(f"t{i}", i, label, (i + 1,), (label,), random.random((choices, choices))) for i in range(length - 1)
    )
    return Problem(groups, transfers)


def test_chains_fold_away() -> None:
    problem = chain_problem(6)
    smaller, inverse = EliminateGroups().apply(problem)
    assert not smaller.groups
    assert evaluate(problem, inverse.expand(np.zeros(0, dtype=np.int64))) == pytest.approx(brute_force(problem))
    assert inverse.offset == pytest.approx(brute_force(problem))


def test_a_group_with_memory_stays() -> None:
    problem = chain_problem(3)
    heavy = replace(problem.groups[1], name="heavy", memory=np.arange(5.0))
    problem = Problem((problem.groups[0], heavy, problem.groups[2]), problem.transfers, memory_limit=2.0)
    smaller, _ = EliminateGroups().apply(problem)
    assert [group.name for group in smaller.groups] == ["heavy"]


def test_a_dear_choice_goes_only_if_resharding_is_cheaper() -> None:
    def problem(price: float) -> Problem:
        groups = tuple(free_group(n, np.array(c)) for n, c in (("a", [0.0, 3.0]), ("b", [0.0, 0.0])))
        label = np.arange(2)
        cost = np.array([[0.0, price], [price, 0.0]])
        return Problem(groups, (Transfer("t", 0, label, (1,), (label,), cost),))

    cheap, _ = DropDominated().apply(problem(2.0))
    dear, _ = DropDominated().apply(problem(4.0))
    assert len(cheap.groups[0].cost) == 1
    assert len(dear.groups[0].cost) == 2


def test_consumers_that_share_no_priced_column_part() -> None:
    two = np.array([0, 1])
    groups = tuple(free_group(f"g{i}", np.zeros(2)) for i in range(3))
    cost = np.array([[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 3.0, 2.0]])
    apart = Problem(groups, (Transfer("t", 0, two, (1, 2), (two, two + 2), cost),))
    together = Problem(groups, (Transfer("t", 0, two, (1, 2), (two, two), cost),))
    assert [t.consumers for t in SimplifyTransfers().apply(apart)[0].transfers] == [(1,), (2,)]
    assert [t.consumers for t in SimplifyTransfers().apply(together)[0].transfers] == [(1, 2)]


@settings(max_examples=150, deadline=None)
@given(Seeds)
def test_message_bounds_and_slacks_hold_for_every_assignment(seed: int) -> None:
    problem, _ = reduce(random_problem(seed))
    if is_impossible(problem) or not problem.groups:
        return
    messages = Messages(problem)
    for price in (0.0, 0.5, 0.1):
        if np.isfinite(problem.memory_limit):
            messages.set_price(price)
        messages.sweep(3)
        check_bound(problem, messages.bound, messages.slack())


@settings(max_examples=50, deadline=None)
@given(Seeds)
def test_the_bound_lies_below_its_slope_in_the_price_of_memory(seed: int) -> None:
    problem, _ = reduce(random_problem(seed))
    if is_impossible(problem) or not problem.groups or np.isinf(problem.memory_limit):
        return
    messages = Messages(problem)
    messages.set_price(0.3)
    messages.sweep(2)
    check_slope(messages)


def test_the_slope_is_that_of_the_cheapest_choices_where_others_are_decoded() -> None:
    """The cheapest choice takes 4 bytes of 2; given what it is sent, the other, of none, is decoded."""
    one, ends = np.zeros(1), np.arange(2)
    groups = (
        Group("a", one, one, one, one),
        Group("b", np.array([0.0, 1.0]), np.array([4.0, 0.0]), *np.zeros((2, 2))),
    )
    transfer = Transfer("t", 0, ends[:1], (1,), (ends,), np.array([[5.0, 0.0]]))
    messages = Messages(Problem(groups, (transfer,), memory_limit=2.0))
    assert list(messages.decode()) == [0, 1] and list(messages.cheapest()) == [0, 0]
    assert messages.excess == 2.0
    check_slope(messages)


def check_slope(messages: Messages) -> None:
    """The bound is concave in the price."""
    bound, slope, price = messages.bound, messages.excess, messages.price
    for other in (0.01, 0.2, 0.4, 5.0):
        messages.price = other
        messages.refresh()
        assert messages.bound <= bound + slope * (other - price) + 1e-9 * (1 + abs(bound) + abs(slope))


@settings(max_examples=150, deadline=None)
@given(Seeds)
def test_the_relaxation_bounds_every_assignment(seed: int) -> None:
    problem, _ = reduce(random_problem(seed))
    if is_impossible(problem) or not problem.groups:
        return
    relaxation = relax(problem, Budget(10.0))
    if not relaxation.feasible:
        assert np.isinf(brute_force(problem))
        return
    check_bound(problem, relaxation.bound, relaxation.slack)
    free = Messages(problem)
    free.sweep(50)
    assert relaxation.bound >= free.bound - 1e-5 * (1 + abs(free.bound)) * max(free.problem.groups[0].cost.max(), 1e-5)


def check_bound(problem: Problem, bound: float, slack: tuple[np.ndarray, ...]) -> None:
    for choices in assignments(problem):
        if fits(problem, choices):
            above = max(float(s[k]) for s, k in zip(slack, choices, strict=True))
            value = evaluate(problem, choices)
            assert bound + above <= value + 1e-9 * (abs(value) + abs(bound) + above)


def test_messages_go_through_a_whole_chain_in_one_sweep() -> None:
    random, choices = np.random.default_rng(3), np.arange(3)
    groups = tuple(Group(f"g{i}", random.uniform(0, 1, 3), *np.zeros((3, 3))) for i in range(7))
    transfers = tuple(
        Transfer(f"t{i}", i, choices, (i + 1,), (choices,), random.uniform(0, 1, (3, 3))) for i in range(6)
    )
    problem = Problem(groups, transfers)
    best = min(evaluate(problem, c) for c in assignments(problem))
    messages = Messages(problem)
    messages.sweep(2)
    assert messages.bound == pytest.approx(best, rel=1e-12)
    assert evaluate(problem, messages.decode()) == pytest.approx(best, rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(Seeds)
def test_descent_never_worsens_and_stays_within_the_limit(seed: int) -> None:
    problem, _ = reduce(random_problem(seed))
    if is_impossible(problem) or not problem.groups:
        return
    near = Neighbourhood.of(problem)
    for choices in assignments(problem)[::7]:
        for index in range(len(problem.groups)) if np.isfinite(evaluate(problem, choices)) else ():
            costs = near.costs(choices, index) - near.costs(choices, index)[choices[index]]
            for k in range(len(costs)):
                other = choices.copy()
                other[index] = k
                change = evaluate(problem, other) - evaluate(problem, choices)
                if np.isfinite(change):
                    assert costs[k] == pytest.approx(change, abs=1e-9)
        if fits(problem, choices):
            better = polish(near, choices)
            assert fits(problem, better) and evaluate(problem, better) <= evaluate(problem, choices) + 1e-12
        found = repair(near, choices)
        assert found is None or fits(problem, found)
    least = min(memory_of(problem, c) for c in assignments(problem))
    assert memory_of(problem, smallest(problem)) == least


def test_a_long_chain_reduces_quickly() -> None:
    start = time.process_time()
    smaller, _ = reduce(chain_problem(400, choices=30))
    assert not smaller.groups
    assert time.process_time() - start < 10
