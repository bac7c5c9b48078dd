"""Finds the least-cost assignment of a :class:`~autopar.solver.problem.Problem`, with a proven bound.

The program, with the names of its constraints in the exported model (:func:`autopar.solver.named_export.export`)::

    minimise    sum_i sum_k cost_i[k] x[i,k]  +  sum_t sum_{p,q} cost_t[p,q] z[t,p,q]
    one_choice[i]         sum_k x[i,k] = 1
    leaves_row[t,c,p]     sum_q e[t,c,p,q] = sum_{k: source[k]=p} x[producer,k]
    enters_column[t,c,q]  sum_p e[t,c,p,q] = sum_{k: target_c[k]=q} x[consumer,k]
    shared[t,c,p,q]       z[t,p,q] >= e[t,c,p,q]           (a column only one consumer can need: z is that e)
    memory                fixed + sum_i sum_k memory_i[k] x[i,k] + T <= memory_limit
    temporary[i]          T >= sum_k temporary_i[k] x[i,k]
    host                  sum_i sum_k host_i[k] x[i,k] <= host_limit
    x binary, e >= 0, z >= 0

The e of one consumer are a transport plan between the two ends' choices, which makes the relaxation the local polytope
of the pairwise problem (Wainwright and Jordan 2008, section 4.1). It is nearly integral in practice. z is paid once
however many consumers need a column.

Method: (1) Exact reductions (:mod:`autopar.solver.reduce`). (2) Message passing on the dual of the relaxation bounds
the optimum. Its decoded choices, repaired and polished by coordinate descent, are incumbents
(:mod:`autopar.solver.message_passing`, :mod:`autopar.solver.dual_ascent`, :mod:`autopar.solver.coordinate_descent`).
Where they cost far more than the bound, it is guessed that the optimum does not, and (1) and (2) are repeated with the
choices that it may then have. (3) Choices whose reduced cost exceeds the distance between incumbent and bound cannot
improve on the incumbent and are dropped (reduced-cost fixing, Dantzig, Fulkerson and Johnson 1954). (1) and (2) are
repeated while that shrinks the problem. (4) If the gap is still open, the linear relaxation of the remaining problem is
solved through ``ortools.math_opt`` and HiGHS (:mod:`autopar.solver.lp_relaxation`), followed by fixing once more and
(5) branch and cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .budget import Budget, reduced_seconds
from .coordinate_descent import Neighbourhood, fits, polish, repair, smallest
from .dual_ascent import NONE, Ascent, Search, ascend
from .least_memory import least_memory
from .lp_relaxation import Relaxation, relax, round_up
from .memory_price import price_between
from .milp import build, nonzeros
from .overlap_prices import solve_windows
from .problem import Floats, Ints, Problem, Solution, memory_of, without_needless_host
from .reduce import Chain, DropForbidden, FewerChoices, is_impossible, keep_choices, reduce
from .shared_reductions import SharedReductions

# Counted seconds of a search for the least memory, of which most programs need a third of one, and its relative gap.
# Chosen.
SMALLEST_SECONDS, SMALLEST_GAP = 10.0, 1e-6
# Sizes of kernels, as shares of the distance from bound to incumbent, and the part of the remaining budget for each.
# Chosen.
KERNELS = {0.15: 0.3, 0.4: 0.3, 1.0: 1.0}
# How far above the bound the best assignment is guessed to be, one guess after the other, as shares of the bound.
# Chosen: the first finds all nine baselines of Llamas of 8B and 13B and of Mixtral 8x7B in bf16 whose gaps were
# 22 to 67%. The second is tried where there is nothing as near as that.
NEAR = (0.0005, 0.005)


def solve(
    problem: Problem,
    *,
    time_limit: float = 60,
    gap: float = 0.005,
    seed: int = 0,
    incumbents: Sequence[Ints] = (),
    counted: bool = False,
    worth: float = float("inf"),
    reductions: SharedReductions | None = None,
) -> Solution:
    """The cheapest assignment within the memory of the device and of the host.

    ``gap``: stop when (objective - bound) / objective is at most this (or 1e-6, the tolerance of the solvers).
    ``time_limit``: in CPU seconds of this process, kept approximately. ``incumbents``: known assignments, one choice
    per group, which need not fit; the result is never worse than any that fits. The same input gives the same result
    unless the time limit cuts the search off. If it is ``counted``, the limit is in counted work, about seconds on one
    core (:mod:`autopar.solver.budget`), and the result is always the same. The bound of an "infeasible" solution is
    infinite if infeasibility is proven, finite if time ran out before an assignment that fits was found. The search
    also ends where it proves that nothing costs less than ``worth``; its bound says so, whatever the status is.
    ``reductions``: those of solves with other limits, which this shares; they change nothing but how long it takes.

    Raises ValueError for a transfer with a negative or undefined price.
    """
    _check(problem)
    problem = without_needless_host(problem)
    budget, known = Budget(time_limit, counted), reductions or SharedReductions()
    if not problem.windows:
        return _solve_plain(problem, budget, gap, seed, incumbents, worth=worth, reductions=known)

    def plain(priced: Problem, part: Budget, target_gap: float, starts: Sequence[Ints], enough: float) -> Solution:
        return _solve_plain(priced, part, target_gap, seed, starts, enough, worth, known)

    return solve_windows(problem, plain, budget=budget, gap=gap, incumbents=incumbents, worth=worth)


def _solve_plain(
    problem: Problem,
    budget: Budget,
    gap: float,
    seed: int,
    incumbents: Sequence[Ints],
    enough: float = float("-inf"),
    worth: float = float("inf"),
    reductions: SharedReductions | None = None,
) -> Solution:
    price = problem.memory_price or price_between(problem, incumbents)
    search = Search(problem, budget, gap, seed, enough=enough, worth=worth, memory_price=price)
    for choices in incumbents:
        search.offer(np.asarray(choices, dtype=np.int64))
    _explore(search, reductions or SharedReductions())
    if not (search.has_incumbent or search.exhausted or search.is_hopeless):
        # Time is up and nothing fits yet. As a last attempt, search for the assignment of least memory.
        least, search.exhausted = smallest_search(problem)
        search.offer(least)
    return _solution(search)


def _solution(search: Search) -> Solution:
    """What a search found."""
    status, budget = _status(search), search.budget
    if status == "infeasible":
        bound = float("inf") if search.exhausted else search.bound
        return Solution(NONE, float("inf"), bound, status, budget.used)
    met, price = tuple(search.met), search.memory_price
    return Solution(search.choices, search.objective, search.bound, status, budget.used, met, price)


def _check(problem: Problem) -> None:
    for transfer in problem.transfers:
        if not (transfer.cost >= 0).all():
            p, q = np.argwhere(~(transfer.cost >= 0))[0]
            raise ValueError(f"transfer {transfer.name}: cost[{p}, {q}] is {transfer.cost[p, q]}, not a price")
    for group in problem.groups:
        if np.isnan(group.cost).any():
            choice = int(np.argmax(np.isnan(group.cost)))
            raise ValueError(f"group {group.name}: the cost of choice {choice} is not a number")


def _explore(search: Search, reductions: SharedReductions) -> None:
    """Runs the search."""
    if np.isfinite(search.problem.memory_limit):
        reduced, chain, seconds = reductions.reduce(search.problem)
    else:
        reduced, chain = reduce(search.problem)
        seconds = reduced_seconds(search.problem, len(chain.links))
    search.budget.spend(seconds)
    if is_impossible(reduced) or _too_large(reduced):
        search.exhausted = True
        return
    while reduced.groups:
        before = _choices(reduced)
        ascent = ascend(search, reduced, chain)
        _look_near(search, reduced, chain, ascent)
        if search.over:
            return
        reduced, chain = _fix(search, reduced, chain, ascent)
        if is_impossible(reduced):
            search.prove(search.floor)
            return
        # Under a memory limit, a second search for the price of memory takes longer than the exact relaxation.
        # Goes on with reductions only while they drop a fifth of the choices. Chosen, not measured.
        if reduced.groups and (reduced.is_limited or _choices(reduced) > 0.8 * before):
            _finish(search, reduced, chain)
            return
    _settle(search, chain)


def _look_near(search: Search, problem: Problem, chain: Chain, ascent: Ascent) -> None:
    """Searches for an assignment that costs hardly more than the bound, among the choices that such a one may have.

    Message passing decodes one group after the other. Where many choices cost the same by theta, it joins some that do
    not go together, however good the bound is. Of few choices, reductions decide most."""
    bound = ascent.bound + chain.offset
    for share in NEAR:
        distance = share * abs(bound)
        if search.over or not bound + distance < search.objective:
            return
        whole, search.floor = search.floor, min(search.floor, bound + distance)
        kernel, links = _within(problem, chain, distance, ascent.slack)
        if is_impossible(kernel):
            search.prove(search.floor)
        elif kernel.groups:
            ascend(search, kernel, links)
        else:
            search.offer(links.expand(NONE))
            search.prove(links.offset)
        search.floor = whole


def _finish(search: Search, reduced: Problem, chain: Chain) -> None:
    """Runs the exact part of the search: linear relaxation, fixing, branch and cut."""
    relaxation = relax(reduced, search.budget.part(), search.seed)
    if not relaxation.feasible:
        search.prove(search.floor)
        search.exhausted = not search.has_incumbent
        return
    search.prove(relaxation.bound + chain.offset)
    if len(relaxation.rounded):
        choices = repair(Neighbourhood.of(reduced), relaxation.rounded)
        search.offer(None if choices is None else chain.expand(choices))
    # Chosen: a small kernel finds good incumbents soon, the whole one proves the bound.
    size = nonzeros(reduced)
    for share in KERNELS:
        if search.over or (share < 1.0 and not search.has_incumbent):
            continue
        if not np.isfinite(relaxation.bound) and not search.budget.part(KERNELS[share]).may_branch(size):
            continue  # The kernel is the whole problem, which is too large to branch on.
        _search_kernel(search, reduced, chain, relaxation, share)


def _search_kernel(search: Search, problem: Problem, chain: Chain, relaxation: Relaxation, share: float) -> None:
    """Branches on the choices whose reduced cost is within ``share`` of the distance from bound to incumbent.

    All other assignments cost at least that much, so a solved kernel proves a bound, and a small kernel yields good
    incumbents early.
    """
    bound = relaxation.bound + chain.offset
    threshold = search.objective
    if search.has_incumbent and np.isfinite(bound):
        # A tenth of the gap is left for the tolerance of the solvers.
        target = search.objective - max(0.9 * search.gap, 1e-7) * abs(search.objective)
        threshold = bound + share * (target - bound)
    kernel, links = _within(problem, chain, threshold - bound if np.isfinite(bound) else np.inf, relaxation.slack)
    if is_impossible(kernel):
        search.prove(threshold)
    elif not kernel.groups:
        search.offer(links.expand(NONE))
        search.prove(min(links.offset, threshold))
    else:
        _branch(search, kernel, links, threshold, search.budget.part(KERNELS[share]))


def _settle(search: Search, chain: Chain) -> None:
    """Takes the only assignment that the reductions left."""
    search.offer(chain.expand(NONE))
    search.exhausted = not search.has_incumbent
    search.prove(chain.offset)


def _status(search: Search) -> str:
    if search.exhausted or not search.has_incumbent:
        return "infeasible"
    return "optimal" if search.closed else "feasible"


def _choices(problem: Problem) -> int:
    return sum(len(group.cost) for group in problem.groups)


def _too_large(problem: Problem) -> bool:
    """Whether even the smallest choices, ignoring transfers, exceed the memory of the device or of the host."""
    # Rounding of byte counts that are not integers must not reject assignments that fit exactly.
    if sum(float(g.host.min()) for g in problem.groups) > problem.host_limit * (1 + 1e-12):
        return True
    if not problem.groups or np.isinf(problem.memory_limit):
        return problem.memory_fixed > problem.memory_limit
    return memory_of(problem, smallest(problem)) > problem.memory_limit * (1 + 1e-12)


def _fix(search: Search, problem: Problem, chain: Chain, ascent: Ascent) -> tuple[Problem, Chain]:
    """Drops the choices that cannot improve the incumbent by more than the gap, and reduces again."""
    if not search.has_incumbent or not np.isfinite(ascent.bound):
        return problem, chain
    # A tenth of the gap is left for the tolerance of the solvers.
    threshold = search.objective - max(0.9 * search.gap, 1e-7) * abs(search.objective)
    search.floor = min(search.floor, threshold)
    return _within(problem, chain, threshold - ascent.bound - chain.offset, ascent.slack)


def _within(problem: Problem, chain: Chain, distance: float, slack: Sequence[Floats]) -> tuple[Problem, Chain]:
    """Keeps only the choices whose slack is below ``distance``, and reduces again."""
    masks = [above < distance for above in slack]
    kept = tuple(np.flatnonzero(mask) for mask in masks)
    position = tuple(np.where(m, np.cumsum(m) - 1, -1).astype(np.int64) for m in masks)
    link = FewerChoices(kept, position)
    fewer = keep_choices(problem, masks)
    if is_impossible(fewer):
        return fewer, Chain((chain, link))
    reduced, further = reduce(fewer)
    return reduced, Chain((chain, link, further))


def _branch(search: Search, problem: Problem, chain: Chain, floor: float, budget: Budget) -> None:
    """Runs branch and cut. Assignments that are not in ``problem`` cost at least ``floor``."""
    program = build(problem)
    value = search.objective - chain.offset
    gap = search.gap * abs(search.objective / value) if np.isfinite(value) and value else search.gap
    outcome = budget.branch(program, min(gap, 1.0), search.seed)
    if outcome.status == "infeasible":
        search.exhausted = floor == np.inf and not search.has_incumbent
        search.prove(floor)
        return
    choices = round_up(problem, program, outcome)
    if len(choices):
        search.offer(chain.expand(choices))
        if fits(problem, choices):
            search.offer(chain.expand(polish(Neighbourhood.of(problem), choices)))
    search.prove(min(outcome.bound + chain.offset, floor))


def smallest_memory(problem: Problem) -> float:
    """The least peak bytes of any assignment of finite cost within host memory; infinite if there is none or none was
    found."""
    choices = smallest_choices(problem)
    return float("inf") if choices is None else memory_of(problem, choices)


def smallest_choices(problem: Problem) -> Ints | None:
    """The assignment that :func:`smallest_search` finds."""
    return smallest_search(problem)[0]


def smallest_search(problem: Problem, budget: Budget | None = None) -> tuple[Ints | None, bool]:
    """Searches for the assignment with the least peak bytes, of those with finite cost and within host memory; exact to
    :data:`SMALLEST_GAP` unless the ``budget`` ends first (default: :data:`SMALLEST_SECONDS` of counted work). Returns
    None if no assignment was found, and whether it is proven that there is none."""
    bare, inverse = DropForbidden().apply(without_needless_host(replace(problem, memory_limit=float("inf"))))
    if is_impossible(bare):
        return None, True
    if not bare.groups:
        return inverse.expand(NONE), False
    choices: Ints | None = smallest(bare)
    is_proven = False
    if choices is not None and not fits(bare, choices):
        budget = budget or Budget(SMALLEST_SECONDS, counted=True)
        choices, is_proven = least_memory(bare, _solve_by_memory, budget, SMALLEST_GAP)
    return None if choices is None else inverse.expand(choices), is_proven


def _solve_by_memory(problem: Problem, budget: Budget, gap: float) -> Solution:
    search = Search(problem, budget, gap, 0)
    _explore(search, SharedReductions())
    return _solution(search)
