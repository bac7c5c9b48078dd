"""The assignment of least peak memory, as an ordinary problem: bytes are its costs.

Peak memory is a sum over groups, and the largest temporary on top. If no temporary may exceed a cap, the least sum is
the optimum of a problem in which choices cost their bytes and transfers are free or forbidden. Equal costs and free
transfers are what the exact reductions (:mod:`autopar.solver.reduce`) dispose of best: for GPTs on 256 devices (276
groups, 8700 choices) they leave nothing, in 0.1 s, where the integer program of the same question has 450,000 nonzeros
and took HiGHS up to a minute. The least peak is the least of sum and cap over all caps. They are tried in the order of
a bound that ignores transfers, which most often proves the first to be the least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .budget import Budget
from .coordinate_descent import smallest_sums
from .problem import Floats, Group, Ints, Problem, Solution, memory_of

# Solves a problem without windows and without a limit of the device's memory, to this relative gap. The bound of an
# "infeasible" solution is infinite if infeasibility is proven.
Plain = Callable[[Problem, Budget, float], Solution]


def least_memory(problem: Problem, plain: Plain, budget: Budget, gap: float) -> tuple[Ints | None, bool]:
    """Searches for the assignment of least peak bytes, of those of finite cost within host memory, to the relative
    ``gap``. ``problem`` has choices of finite cost alone, and no limit of the device's memory. The search ends early
    with its ``budget``, with the best found so far. Returns None if no assignment was found, and whether it is proven
    that there is none."""
    caps, sums = smallest_sums(problem)
    best: Ints | None = None
    peak, last = np.inf, len(caps) - 1
    while np.isfinite(sums).any():
        at = int(np.argmin(sums + caps))
        is_over = budget.left <= 0
        if is_over and best is None and np.isfinite(sums[last]):
            at = last  # Under which something is most easily found.
        elif is_over or sums[at] + caps[at] >= (1.0 - gap) * peak - problem.memory_fixed:
            return best, False
        found = plain(within_cap(problem, float(caps[at])), budget, gap)
        if found.status != "infeasible" and memory_of(problem, found.choices) < peak:
            best, peak = found.choices, memory_of(problem, found.choices)
        # No lower cap can have a smaller sum.
        sums[:at] = np.maximum(sums[:at], found.bound)
        proves_none = found.status == "infeasible" and found.bound == np.inf
        if at == last and best is None and proves_none:
            return None, True
        sums[at] = np.inf
    return best, False


def least_bound(problem: Problem) -> float:
    """Peak bytes that no assignment is below, as the problem counts them, whatever transfers and the host allow."""
    if not problem.groups:
        return problem.memory_fixed
    caps, sums = smallest_sums(problem)
    return problem.memory_fixed + float((sums + caps).min())


def within_cap(problem: Problem, cap: float) -> Problem:
    """The problem in which choices cost their bytes, those with a larger temporary than ``cap`` are forbidden, and
    transfers are free or forbidden."""
    groups = tuple(_by_memory(group, cap) for group in problem.groups)
    transfers = tuple(replace(t, cost=np.where(np.isfinite(t.cost), 0.0, np.inf)) for t in problem.transfers)
    return Problem(groups, transfers, host_limit=problem.host_limit)


def _by_memory(group: Group, cap: float) -> Group:
    none: Floats = np.zeros(len(group.cost))
    allowed = np.isfinite(group.cost) & (group.temporary <= cap)
    return replace(group, cost=np.where(allowed, group.memory, np.inf), memory=none, temporary=none)
