"""The least memory of an assignment, as an ordinary problem."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.budget import Budget
from autopar.solver.least_memory import within_cap
from autopar.solver.problem import Group, Problem, Transfer, evaluate, memory_of
from autopar.solver.solve import smallest_search

LABEL = np.arange(2)


def tied(pairs: int, apart: float = np.inf) -> Problem:
    """Pairs of groups that must choose alike: 1 byte and 9, or 4 bytes each."""

    def group(name: str, small: float, temporary: float) -> Group:
        return Group(name, np.zeros(2), np.array([small, 4.0]), np.array([temporary, 0.0]), np.zeros(2))

    groups = [
        group(f"{end}{i}", small, 3.0 * (i == 0)) for i in range(pairs) for end, small in (("a", 1.0), ("b", 9.0))
    ]
    cost = np.array([[0.0, apart], [apart, 0.0]])
    transfers = tuple(Transfer(f"t{i}", 2 * i, LABEL, (2 * i + 1,), (LABEL,), cost) for i in range(pairs))
    return Problem(tuple(groups), transfers)


def test_what_transfers_forbid_is_not_taken() -> None:
    choices, _ = smallest_search(tied(3))
    assert choices is not None and np.isfinite(evaluate(tied(3), choices))
    assert memory_of(tied(3), choices) == 3 * 8.0
    free, _ = smallest_search(tied(3, apart=1.0))
    assert free is not None and memory_of(tied(3, apart=1.0), free) == 4.0 + 2 * 5.0 + min(4.0, 1.0 + 3.0)


def test_a_cap_forbids_larger_temporaries() -> None:
    capped = within_cap(tied(2), 2.0)
    assert [np.isinf(group.cost).any() for group in capped.groups] == [True, True, False, False]
    assert not any(group.memory.any() or group.temporary.any() for group in capped.groups)
    assert [group.cost.min() for group in capped.groups] == [4.0, 4.0, 1.0, 4.0]


def test_none_is_proven_only_where_there_is_none() -> None:
    never = np.full((2, 2), np.inf)
    problem = tied(2)
    impossible = replace(problem, transfers=tuple(replace(t, cost=never) for t in problem.transfers))
    assert smallest_search(impossible) == (None, True)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1.0])
def test_something_is_found_whatever_the_budget(seconds: float) -> None:
    problem = tied(4)
    choices, is_proven = smallest_search(problem, Budget(seconds, counted=True))
    assert choices is not None and not is_proven and np.isfinite(evaluate(problem, choices))
