"""Problems with windows, by those without: the exposed seconds of every window are given prices.

    hidden max(0, messages - computing)  =  max over 0 <= p <= 1 of  p hidden (messages - computing)

so for every p, one for each window, the plain problem in which messages of a window cost 1 - hidden (1 - p) times their
price and its computing 1 - hidden p times bounds the true optimum from below, and any assignment, truly evaluated, from
above (Lagrangian relaxation of the rows ``exposed``; Geoffrion 1974). Where all messages hide, p near 0 closes the gap
at once, and where computing is short, p near 1. At any p every assignment costs a linear function of p, so that the
known ones bound from above what any price can prove; the next price is where that is highest (cutting planes: Kelley
1960). A gap that stays (the best assignments of two prices differ) is reported like any other. What a price finds is
polished with its windows as they are.
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

# Solves a problem without windows: (problem, budget, gap, incumbents, what costs little enough to stop).
Plain = Callable[[Problem, Budget, float, Sequence[Ints], float], Solution]
# Prices that are tried. Chosen: most gaps close at the first two (see above); each costs a solve.
ROUNDS = 6
# Pairs of choices in transfers above which the whole program is not branched on. Chosen: it gets nowhere on more.
MOST_PAIRS = 20_000
# Seconds of that. Chosen: it closes a gap soon or not at all.
MOST_SECONDS = 5.0
# Hidden messages cost a little, so that of two plans that hide them the one that sends less is taken.
# Chosen: a fifth of Options.gap.
LEAST_PRICE = 0.002
# Parts of the gap: the most and the least to which a price is solved, and what another must be able to close.
# Chosen, not measured.
SOLVED, SOLVED_LAST, LEAST_GAIN = 0.8, 0.3, 0.1
# Prices that differ by less prove the same.
# Chosen, not measured.
SAME_PRICE = 0.02
NONE = np.zeros(0, dtype=np.int64)


def at_prices(problem: Problem, prices: Sequence[float]) -> Problem:
    """The plain problem whose every assignment costs at most what it costs in ``problem``."""
    own, sent = np.ones(len(problem.groups)), np.ones(len(problem.transfers))
    for window, price in zip(problem.windows, prices, strict=True):
        own[list(window.groups)] -= window.hidden * price * np.array([*window.groups.values()])
        sent[list(window.transfers)] -= window.hidden * (1.0 - price) * np.array([*window.transfers.values()])
    groups = tuple(replace(g, cost=_scaled(g.cost, f)) for g, f in zip(problem.groups, own, strict=True))
    transfers = tuple(replace(t, cost=_scaled(t.cost, f)) for t, f in zip(problem.transfers, sent, strict=True))
    return replace(problem, groups=groups, transfers=transfers, windows=())


def _scaled(cost: Floats, factor: float) -> Floats:
    """What is forbidden stays so."""
    if factor == 1.0:
        return cost
    return np.multiply(cost, max(0.0, float(factor)), out=np.full_like(cost, np.inf), where=np.isfinite(cost))


@dataclass
class _Hunt:
    """The best assignment and the best bound so far, and of every known assignment what it costs at any prices."""

    problem: Problem
    choices: Ints = field(default_factory=lambda: NONE)
    objective: float = float("inf")
    bound: float = float("-inf")
    cuts: list[Floats] = field(default_factory=list)

    def offer(self, choices: Ints) -> None:
        """Keeps ``choices`` if they fit and cost less than the best by more than rounding: else that one, which may
        send less, stays."""
        if len(choices) and is_within(self.problem, choices):
            objective = evaluate(self.problem, choices)
            if np.isfinite(objective):
                self.cuts.append(_at_any_price(self.problem, choices))
            if objective + ROUNDING * abs(objective) < self.objective:
                self.choices, self.objective = choices, objective

    def closed(self, gap: float) -> bool:
        return self.objective - self.bound <= max(gap, 1e-6) * abs(self.objective)

    def part(self, most: float, gap: float) -> float:
        """To which part of the gap prices are solved that may prove ``most``: so that the gap closes if they do or, if
        not even that were enough, as exactly as any."""
        spare = most - (1.0 - gap) * self.objective
        return min(max(0.5 * spare / (gap * abs(most)) if gap * most else 0.0, SOLVED_LAST), SOLVED)

    def search(self, budget: Budget, gap: float) -> None:
        """Branch and cut on the whole program, where it is small enough to get anywhere."""
        allowed, inverse = DropForbidden().apply(replace(self.problem, windows=()))
        if budget.left <= 0 or sum(t.cost.size * len(t.consumers) for t in allowed.transfers) > MOST_PAIRS:
            return
        whole = replace(allowed, windows=self.problem.windows)
        program = build(whole)
        outcome = budget.branch(program, gap)
        found = round_up(whole, program, outcome)
        if len(found):
            self.offer(inverse.expand(found))
        if np.isfinite(outcome.bound):
            self.bound = max(self.bound, min(outcome.bound, self.objective))

    def highest(self, budget: Budget) -> tuple[list[float], float]:
        """The prices at which the cheapest known assignment costs most, and what it costs there."""
        count, unit = len(self.problem.windows), max(abs(self.objective), 1e-300)
        cuts = np.array(self.cuts) / unit
        # Variables: what is proven, and the prices above the least. Rows: one for each assignment, one for each price.
        rows = np.hstack([np.ones((len(cuts), 1)), -cuts[:, 1:]])
        rows = np.vstack([rows, np.hstack([np.zeros((count, 1)), np.eye(count)])])
        upper = np.concatenate([cuts[:, 0] + LEAST_PRICE * cuts[:, 1:].sum(axis=1), np.full(count, 1.0 - LEAST_PRICE)])
        row, column = np.nonzero(rows)
        # Of prices that prove the same the least: their assignments send less.
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
    """What an assignment costs at prices p, as the coefficients of (1, p)."""
    sides = np.array([sides_of(problem, window, choices) for window in problem.windows])
    hidden = np.array([window.hidden for window in problem.windows])
    plain = evaluate(replace(problem, windows=()), choices)
    return np.array([plain - float(hidden @ sides[:, 0]), *(hidden * (sides[:, 0] - sides[:, 1]))])


@dataclass(frozen=True)
class _Attempt:
    """Prices to solve at, to which ``part`` of the gap, and what costs little ``enough`` there to show that they prove
    nothing more."""

    prices: list[float]
    part: float = SOLVED
    enough: float = float("-inf")


def _next(hunt: _Hunt, attempt: _Attempt, found: Solution, budget: Budget, gap: float) -> _Attempt | None:
    """What to solve after ``attempt``, of which ``found`` came; None if nothing would prove more."""
    prices, most = hunt.highest(budget)
    enough = hunt.bound + LEAST_GAIN * gap * abs(hunt.objective)
    if most <= enough:
        return None
    if found.objective <= attempt.enough or not np.allclose(prices, attempt.prices, atol=SAME_PRICE):
        return _Attempt(prices, hunt.part(most, gap), enough)
    # No other prices prove more: once more at these, more exactly, unless that was done or took too long.
    done = attempt.part <= SOLVED_LAST or found.status != "optimal"
    return None if done else _Attempt(prices, SOLVED_LAST, enough)


def solve_windows(
    problem: Problem, plain: Plain, *, budget: Budget, gap: float, incumbents: Sequence[Ints] = ()
) -> Solution:
    """Solves a problem with windows by ``plain``; as :func:`autopar.solver.solve.solve` otherwise."""
    count = len(problem.windows)
    hunt, near = _Hunt(problem), Neighbourhood.of(problem)
    slots = [transfer.cost.size for transfer in problem.transfers for _ in transfer.consumers]
    sweep = sweep_seconds(len(slots), sum(slots))
    for choices in incumbents:
        hunt.offer(np.asarray(choices, dtype=np.int64))
    attempt: _Attempt = _Attempt([LEAST_PRICE] * count)
    for _ in range(ROUNDS):
        left = budget.left
        known = [choices for choices in (*incumbents, hunt.choices) if len(choices)]
        found = plain(at_prices(problem, attempt.prices), budget.part(0.5), attempt.part * gap, known, attempt.enough)
        if found.status == "infeasible":
            return replace(found, seconds=budget.used)
        hunt.offer(found.choices)
        hunt.bound = max(hunt.bound, min(found.bound, hunt.objective))
        if not hunt.closed(gap) and is_within(problem, found.choices):
            hunt.offer(polish(near, found.choices))
            budget.spend(POLISHING * sweep)
        following = None if hunt.closed(gap) or left <= 0 else _next(hunt, attempt, found, budget, gap)
        if following is None:
            break
        attempt = following
    if not hunt.closed(gap):
        hunt.search(budget.part(most=MOST_SECONDS), gap)
    status = "optimal" if hunt.closed(gap) else "feasible"
    return Solution(hunt.choices, hunt.objective, hunt.bound, status, budget.used)
