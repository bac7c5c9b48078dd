"""Solves problems with windows by problems without: the exposed seconds of every window are given prices.

    hidden max(0, messages - computing)  =  max over 0 <= p <= 1 of  p hidden (messages - computing)

Take any p, one for each window. In the plain problem, messages of a window cost 1 - hidden (1 - p) times their price,
and its computing costs 1 - hidden p times its price. This problem bounds the true optimum from below, and any
assignment, evaluated with windows, bounds it from above (Lagrangian relaxation of the rows ``exposed``; Geoffrion
1974). If all messages can be hidden, p near 0 closes the gap at once; if there is little computing, p near 1 does. The
cost of every assignment is linear in p, so the known assignments limit the bound that any price can prove. The next
price is where this limit is highest (cutting planes: Kelley 1960). A gap that stays (the best assignments of two prices
differ) is reported like any other. The assignment found at a price is polished on the problem with windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .budget import Budget, sweep_seconds
from .coordinate_descent import ROUNDING, Neighbourhood, polish
from .dual_ascent import POLISHING
from .lp_relaxation import round_up
from .milp import MixedIntegerProgram, build
from .problem import Floats, Ints, Problem, Solution, evaluate, is_within, sides_of
from .reduce import DropForbidden

# Solves a problem without windows: (problem, budget, gap, incumbents, the cost at which it may stop).
Plain = Callable[[Problem, Budget, float, Sequence[Ints], float], Solution]
# Prices that are tried. Chosen: most gaps close at the first two (see above); each costs a solve.
ROUNDS = 6
# Pairs of choices in transfers above which the whole program is not branched on. Chosen: it gets nowhere on more.
MOST_PAIRS = 20_000
# Seconds of that. Chosen: it closes a gap soon or not at all.
MOST_SECONDS = 5.0
# Hidden messages cost a little, so that of two plans that hide all messages the one that sends less is chosen.
# Chosen: a fifth of Options.gap.
LEAST_PRICE = 0.002
# Shares of the gap: the largest and the smallest to which the problem at a price is solved, and the share that another
# price must be able to close.
# Chosen, not measured.
SOLVED, SOLVED_LAST, LEAST_GAIN = 0.8, 0.3, 0.1
# Prices that differ by less are taken as equal.
# Chosen, not measured.
SAME_PRICE = 0.02
NONE = np.zeros(0, dtype=np.int64)


def at_prices(problem: Problem, prices: Sequence[float]) -> Problem:
    """The plain problem at these prices. Every assignment costs at most what it costs in ``problem``."""
    own, sent = np.ones(len(problem.groups)), np.ones(len(problem.transfers))
    for window, price in zip(problem.windows, prices, strict=True):
        own[list(window.groups)] -= window.hidden * price * np.array([*window.groups.values()])
        sent[list(window.transfers)] -= window.hidden * (1.0 - price) * np.array([*window.transfers.values()])
    groups = tuple(replace(g, cost=_scaled(g.cost, f)) for g, f in zip(problem.groups, own, strict=True))
    transfers = tuple(replace(t, cost=_scaled(t.cost, f)) for t, f in zip(problem.transfers, sent, strict=True))
    return replace(problem, groups=groups, transfers=transfers, windows=())


def _scaled(cost: Floats, factor: float) -> Floats:
    """``cost`` times ``factor``. Forbidden entries stay forbidden."""
    if factor == 1.0:
        return cost
    return np.multiply(cost, max(0.0, float(factor)), out=np.full_like(cost, np.inf), where=np.isfinite(cost))


@dataclass
class _PriceSearch:
    """The best assignment and the best bound so far. ``cuts``: the cost of every known assignment as a function of the
    prices. ``met``: as in :class:`.Solution`, at any prices."""

    problem: Problem
    choices: Ints = field(default_factory=lambda: NONE)
    objective: float = float("inf")
    bound: float = float("-inf")
    cuts: list[Floats] = field(default_factory=list)
    met: list[Ints] = field(default_factory=list)

    def offer(self, choices: Ints) -> None:
        """Keeps ``choices`` if they fit and cost less than the best assignment by more than rounding. Otherwise the
        best one stays, since it may send less."""
        if len(choices) and is_within(self.problem, choices):
            objective = evaluate(self.problem, choices)
            if np.isfinite(objective):
                self.cuts.append(_at_any_price(self.problem, choices))
            if objective + ROUNDING * abs(objective) < self.objective:
                self.choices, self.objective = choices, objective
                self.met.append(choices)

    def closed(self, gap: float) -> bool:
        return self.objective - self.bound <= max(gap, 1e-6) * abs(self.objective)

    def part(self, most: float, gap: float) -> float:
        """The share of the gap to which to solve at prices that may prove at most ``most``: such that the gap closes if
        they do prove it. If even that would not close it, the smallest share."""
        spare = most - (1.0 - gap) * self.objective
        return min(max(0.5 * spare / (gap * abs(most)) if gap * most else 0.0, SOLVED_LAST), SOLVED)

    def search(self, budget: Budget, gap: float) -> None:
        """Runs branch and cut on the program with windows, if that is small enough."""
        allowed, inverse = DropForbidden().apply(replace(self.problem, windows=()))
        if budget.left <= 0 or sum(t.cost.size * len(t.consumers) for t in allowed.transfers) > MOST_PAIRS:
            return
        windowed = replace(allowed, windows=self.problem.windows)
        program = build(windowed)
        outcome = budget.branch(program, gap)
        choices = round_up(windowed, program, outcome)
        if len(choices):
            self.offer(inverse.expand(choices))
        if np.isfinite(outcome.bound):
            self.bound = max(self.bound, min(outcome.bound, self.objective))

    def highest(self, budget: Budget) -> tuple[list[float], float]:
        """The prices at which the cheapest known assignment costs most, and its cost there."""
        count, unit = len(self.problem.windows), max(abs(self.objective), 1e-300)
        cuts = np.array(self.cuts) / unit
        # Variables: the provable bound, and the prices above the least. Rows: one per assignment, one per price.
        rows = np.hstack([np.ones((len(cuts), 1)), -cuts[:, 1:]])
        rows = np.vstack([rows, np.hstack([np.zeros((count, 1)), np.eye(count)])])
        upper = np.concatenate([cuts[:, 0] + LEAST_PRICE * cuts[:, 1:].sum(axis=1), np.full(count, 1.0 - LEAST_PRICE)])
        row, column = np.nonzero(rows)
        # Of prices that prove the same bound, take the least: their assignments send less.
        cost = np.array([-1.0, *[1e-6] * count])
        program = MixedIntegerProgram(
            cost=cost,
            binary=np.zeros(count + 1, dtype=bool),
            lower=np.full(len(upper), -np.inf),
            upper=upper,
            row=row,
            column=column,
            value=rows[row, column],
            first=np.zeros(0, dtype=np.int64),
            families=(),
            unit=1.0,
            memory_unit=1.0,
        )
        values = budget.simplex(program).values
        if not len(values):
            return [LEAST_PRICE] * count, self.bound
        return [min(1.0, LEAST_PRICE + float(p)) for p in values[1:]], float(values[0]) * unit


def _at_any_price(problem: Problem, choices: Ints) -> Floats:
    """The cost of an assignment at prices p, as the coefficients of (1, p)."""
    sides = np.array([sides_of(problem, window, choices) for window in problem.windows])
    hidden = np.array([window.hidden for window in problem.windows])
    plain = evaluate(replace(problem, windows=()), choices)
    return np.array([plain - float(hidden @ sides[:, 0]), *(hidden * (sides[:, 0] - sides[:, 1]))])


@dataclass(frozen=True)
class _Attempt:
    """An attempt to raise the bound: the prices to solve at, to which ``part`` of the gap, and the cost that is low
    ``enough`` to show that these prices prove nothing more."""

    prices: list[float]
    part: float = SOLVED
    enough: float = float("-inf")


def _next(search: _PriceSearch, attempt: _Attempt, solution: Solution, budget: Budget, gap: float) -> _Attempt | None:
    """The attempt after ``attempt``, which yielded ``solution``; None if no attempt would prove more."""
    prices, most = search.highest(budget)
    enough = search.bound + LEAST_GAIN * gap * abs(search.objective)
    if most <= enough:
        return None
    if solution.objective <= attempt.enough or not np.allclose(prices, attempt.prices, atol=SAME_PRICE):
        return _Attempt(prices, search.part(most, gap), enough)
    # No other prices prove more. Solve at these again, more exactly, unless that was done or took too long.
    done = attempt.part <= SOLVED_LAST or solution.status != "optimal"
    return None if done else _Attempt(prices, SOLVED_LAST, enough)


def solve_windows(
    problem: Problem,
    plain: Plain,
    *,
    budget: Budget,
    gap: float,
    incumbents: Sequence[Ints] = (),
    worth: float = float("inf"),
) -> Solution:
    """Solves a problem with windows, using ``plain`` for problems without; see :func:`autopar.solver.solve.solve`."""
    count = len(problem.windows)
    search, neighbourhood = _PriceSearch(problem), Neighbourhood.of(problem)
    slots = [transfer.cost.size for transfer in problem.transfers for _ in transfer.consumers]
    sweep = sweep_seconds(len(slots), sum(slots))
    for choices in incumbents:
        search.offer(np.asarray(choices, dtype=np.int64))
    attempt, price = _Attempt([LEAST_PRICE] * count), problem.memory_price
    for _ in range(ROUNDS):
        left = budget.left
        starts = [choices for choices in (*incumbents, search.choices) if len(choices)]
        priced = replace(at_prices(problem, attempt.prices), memory_price=price)
        solution = plain(priced, budget.part(0.5), attempt.part * gap, starts, attempt.enough)
        if solution.status == "infeasible":
            return replace(solution, seconds=budget.used)
        price = solution.memory_price or price
        search.offer(solution.choices)
        search.met += solution.met
        search.bound = max(search.bound, min(solution.bound, search.objective))
        if not search.closed(gap) and is_within(problem, solution.choices):
            search.offer(polish(neighbourhood, solution.choices))
            budget.spend(POLISHING * sweep)
        is_over = search.closed(gap) or worth <= search.bound < float("inf") or left <= 0
        next_attempt = None if is_over else _next(search, attempt, solution, budget, gap)
        if next_attempt is None:
            break
        attempt = next_attempt
    if not search.closed(gap) and search.bound < worth:
        search.search(budget.part(most=MOST_SECONDS), gap)
    status = "optimal" if search.closed(gap) else "feasible"
    met = tuple(search.met)
    return Solution(search.choices, search.objective, search.bound, status, budget.used, met, price)
