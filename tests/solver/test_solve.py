"""The solver against brute force, and what it promises about status, bound and memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.solver import highs as solve_run
from autopar.solver.coordinate_descent import smallest
from autopar.solver.highs import LEAST_PRESOLVED, run
from autopar.solver.milp import MixedIntegerProgram, build
from autopar.solver.named_export import export
from autopar.solver.outcome import Effort
from autopar.solver.problem import Group, Ints, Problem, Transfer, evaluate, host_of, is_within, memory_of
from autopar.solver.reduce import DropForbidden, is_impossible
from autopar.solver.solve import smallest_memory, solve


def random_problem(seed: int, groups: int = 5, choices: int = 3, limited: bool = True, hosted: bool = False) -> Problem:
    """A small problem with shared and parallel transfers, self transfers, forbidden entries, ties and a
    memory limit; ``hosted``: and one of the host's memory."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, choices + 1, groups)
    scale = random.choice([1.0, 1e-5])

    forbid = random.choice([0.0, 0.0, 0.1])

    def prices(*shape: int) -> np.ndarray:
        drawn = random.integers(0, 6, shape) * scale if random.random() < 0.5 else random.random(shape) * scale
        return np.where(random.random(shape) < forbid, np.inf, drawn.astype(float))

    def make(i: int, size: int) -> Group:
        plain = random.random() < 0.3
        memory = np.zeros(size) if plain else random.integers(0, 5, size).astype(float)
        temporary = np.zeros(size) if plain else random.integers(0, 5, size).astype(float)
        return Group(f"g{i}", prices(size), memory, temporary, np.zeros(size))

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
    problem = Problem(made, tuple(transfers), limit, float(random.integers(0, 3)))
    return with_host(problem, np.random.default_rng((seed, 1))) if hosted else problem


def with_host(problem: Problem, random: np.random.Generator) -> Problem:
    """The problem in which what saves memory of the device takes some of the host's."""
    groups = tuple(
        replace(g, host=np.where(random.random(len(g.cost)) < 0.3, 0.0, g.memory.max(initial=0.0) - g.memory))
        for g in problem.groups
    )
    most = sum(float(g.host.max()) for g in groups)
    return replace(problem, groups=groups, host_limit=float(random.integers(0, int(most) + 1)))


def assignments(problem: Problem) -> list[Ints]:
    return [np.array(c, dtype=np.int64) for c in itertools.product(*(range(len(g.cost)) for g in problem.groups))]


def brute_force(problem: Problem) -> float:
    """The optimum by trying everything; infinite if nothing fits."""
    allowed = (c for c in assignments(problem) if is_within(problem, c))
    return min((evaluate(problem, c) for c in allowed), default=float("inf"))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_solve_finds_what_brute_force_finds(seed: int, limited: bool, hosted: bool) -> None:
    problem = random_problem(seed, limited=limited, hosted=hosted)
    best = brute_force(problem)
    solution = solve(problem, gap=0.0)
    if np.isinf(best):
        assert solution.status == "infeasible" and len(solution.choices) == 0 and solution.bound == np.inf
        return
    assert solution.status == "optimal"
    assert solution.objective == evaluate(problem, solution.choices)
    assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert is_within(problem, solution.choices)
    assert solution.bound <= best * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.05, 0.5]), st.booleans())
def test_bound_and_gap_are_honest(seed: int, gap: float, hosted: bool) -> None:
    problem = random_problem(seed, groups=6, choices=3, hosted=hosted)
    best = brute_force(problem)
    solution = solve(problem, gap=gap)
    if np.isfinite(best):
        assert solution.bound <= best * (1 + 1e-6) + 1e-12 <= solution.objective * (1 + 2e-6) + 2e-12
        assert (solution.status == "optimal" and solution.gap <= max(gap, 1e-6)) or solution.objective == 0


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
@example(7, False)  # HiGHS's presolve calls it infeasible.
def test_smallest_memory_is_the_least_of_all_finite_assignments(seed: int, hosted: bool) -> None:
    problem = random_problem(seed, hosted=hosted)
    finite = [
        memory_of(problem, c)
        for c in assignments(problem)
        if np.isfinite(evaluate(problem, c)) and host_of(problem, c) <= problem.host_limit
    ]
    assert smallest_memory(problem) == min(finite, default=float("inf"))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_program_as_it_stands_has_the_optimum_of_the_problem(seed: int, hosted: bool) -> None:
    problem = random_problem(seed, hosted=hosted)
    program_problem = forbid(problem)
    if program_problem is None:
        return
    outcome = run(build(program_problem), False, Effort(10.0))
    best = brute_force(program_problem)
    if np.isinf(best):
        assert outcome.status == "infeasible"
    else:
        assert outcome.bound == pytest.approx(best, rel=1e-4, abs=1e-9)


def forbid(problem: Problem) -> Problem | None:
    """The problem without choices of infinite cost, as the integer program wants it."""
    smaller, _ = DropForbidden().apply(problem)
    return None if is_impossible(smaller) else smaller


def test_rows_of_the_exported_program_are_named() -> None:
    model = export(layered(3, 3))
    names = list(model.linear_constraints.names)
    assert len(set(names)) == len(names) == len(model.linear_constraints.ids)
    assert {
        "one_choice[g0]",
        "leaves_row[t0,g1#0,0]",
        "enters_column[t0,g1#0,2]",
        "memory",
        "temporary[g0]",
    } <= set(names)


def layered(groups: int, choices: int, seed: int = 0, share: float = 0.5) -> Problem:
    """A ladder with shared transfers and a memory limit ``share`` of the way between least and most."""
    random = np.random.default_rng(seed)

    def group(i: int) -> Group:
        return Group(
            f"g{i}", random.random(choices), 1 + random.random(choices), 1 + random.random(choices), np.zeros(choices)
        )

    made = tuple(group(i) for i in range(groups))
    label = np.arange(choices)
    transfers = []
    for i in range(groups - 1):
        consumers = tuple(range(i + 1, min(i + 4, groups)))
        cost = random.random((choices, choices)) * (1 - np.eye(choices))
        transfers.append(Transfer(f"t{i}", i, label, consumers, (label,) * len(consumers), cost))
    low = memory_of(made_of := Problem(made, tuple(transfers)), smallest(made_of))
    high = memory_of(made_of, np.array([np.argmax(g.memory) for g in made]))
    return Problem(made, tuple(transfers), low + share * (high - low))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_larger_problems_close_the_gap_and_repeat_themselves(share: float) -> None:
    problem = layered(12, 5, seed=3, share=share)
    first, second = (solve(problem, gap=0.02, time_limit=30, seed=1) for _ in range(2))
    assert first.status == "optimal" and first.gap <= 0.02
    assert (first.choices == second.choices).all() and first.bound == second.bound
    exact = run(build(problem), False, Effort(30.0, gap=1e-6))
    assert first.bound <= exact.bound * (1 + 1e-6) <= first.objective * (1 + 2e-6)


def permuted(groups: int, choices: int, seed: int) -> Problem:
    """Groups of which each pair agrees for free if one chooses the image of the other under a permutation, which all
    pairs do only for one hidden assignment. To the relaxation, and to decoding, all choices are equally good."""
    random = np.random.default_rng(seed)
    hidden, label = random.integers(0, choices, groups), np.arange(choices)
    own = np.full(choices, 1.0)
    made = tuple(Group(f"g{i}", own, *np.zeros((3, choices))) for i in range(groups))
    transfers = []
    for i, j in itertools.combinations(range(groups), 2):
        image = random.permutation(choices)
        other = int(np.flatnonzero(image == hidden[j])[0])
        image[[hidden[i], other]] = image[[other, hidden[i]]]
        cost = np.ones((choices, choices))
        cost[label, image] = 0.0
        transfers.append(Transfer(f"t{i}{j}", i, label, (j,), (label,), cost))
    return Problem(made, tuple(transfers))


@pytest.mark.parametrize("seed", range(4))
def test_what_decoding_misses_is_found_without_the_relaxation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("autopar.solver.solve.relax")
    solution = solve(permuted(10, 6, seed), gap=0.01, counted=True)
    assert solution.objective == 10.0 and solution.status == "optimal"


def test_without_time_something_that_fits_is_returned_with_an_honest_gap() -> None:
    problem = layered(60, 12, share=0.1)
    solution = solve(problem, time_limit=0.0, gap=0.0)
    assert solution.status == "feasible" and solution.gap > 0
    assert memory_of(problem, solution.choices) <= problem.memory_limit
    assert solution.bound <= solve(problem, time_limit=2.0, gap=0.05).objective


def test_a_known_assignment_is_never_lost() -> None:
    problem = layered(30, 8, seed=5)
    good = solve(problem, time_limit=3.0, gap=0.05)
    again = solve(problem, time_limit=0.0, gap=0.0, incumbents=[good.choices, np.zeros(30, dtype=np.int64)])
    assert again.objective <= good.objective


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), limited=st.booleans(), share=st.sampled_from([0.3, 0.9, 1.1, 3.0]))
def test_what_is_not_worth_while_is_proven_not_to_be(seed: int, limited: bool, share: float) -> None:
    """Where the optimum is worth while it is found as ever; otherwise the bound says that nothing is, and is true."""
    problem = random_problem(seed, limited=limited)
    least = brute_force(problem)
    if not np.isfinite(least) or least <= 0:
        return
    solution = solve(problem, gap=0.0, worth=share * least)
    assert solution.bound <= least * (1 + 1e-6)
    if share > 1:
        assert (solution.choices == solve(problem, gap=0.0).choices).all()
        assert solution.objective == pytest.approx(least)
    else:
        assert solution.bound >= share * least * (1 - 1e-9)
        assert solution.status in ("optimal", "feasible", "infeasible")


def test_a_limit_below_the_least_is_infeasible_and_the_least_itself_is_not() -> None:
    problem = layered(20, 6)
    least = smallest_memory(problem)
    assert solve(replace(problem, memory_limit=least * 0.999)).status == "infeasible"
    tight = solve(replace(problem, memory_limit=least), time_limit=5.0)
    assert tight.status in ("optimal", "feasible") and memory_of(problem, tight.choices) <= least


def test_no_groups_cost_nothing() -> None:
    solution = solve(Problem((), ()))
    assert (solution.status, solution.objective, solution.gap) == ("optimal", 0.0, 0.0)
    assert solve(Problem((), (), memory_limit=1.0, memory_fixed=2.0)).status == "infeasible"


def test_a_price_that_is_none_is_refused_by_name() -> None:
    group = Group("only", np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1))
    zero = np.zeros(1, dtype=np.int64)
    bad = Transfer("activation", 0, zero, (0,), (zero,), np.array([[-1.0]]))
    with pytest.raises(ValueError, match=r"transfer activation: cost\[0, 0\] is -1.0"):
        solve(Problem((group,), (bad,)))


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("least", [LEAST_PRESOLVED, 0])
def test_a_program_of_which_presolve_never_ends_is_solved(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS's presolve goes on for ever on this one, and looks at no time limit."""
    monkeypatch.setattr(solve_run, "LEAST_PRESOLVED", least)
    cost = np.array([1000.0, 177.42, 420.62, 579.6, 36.24, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    equations = (
        "+0 +1", "+2 +3", "-0 +5 +6", "-1 +7", "-0 +5 +7", "-1 +6", "+4 -6", "-0 +8 +9", "-1 +10", "-3 +8 +10", "-2 +9",
        "+4 -9",
    )  # fmt: skip
    terms = [(row, int(term[1:]), float(term[0] + "1")) for row, line in enumerate(equations) for term in line.split()]
    row, column, value = (np.array(part) for part in zip(*terms, strict=True))
    lower, upper = np.zeros(12), np.zeros(12)
    lower[:2] = upper[:2] = 1.0
    upper[[6, 11]] = np.inf
    program = MixedIntegerProgram(
        cost, np.arange(11) < 4, lower, upper, row, column, value, np.array([0, 2]), (), 1.0, 1.0
    )
    assert run(program, False, Effort(5.0)).bound == pytest.approx(1000 + 420.62 + 36.24)
