"""Problems with windows, by those without: the exposed seconds of every window are given prices.

    hidden max(0, messages - computing)  =  max over 0 <= p <= 1 of  p hidden (messages - computing)

so for every p, one for each window, the plain problem in which messages of a window cost 1 - hidden (1 - p) times their
price and its computing 1 - hidden p times bounds the true optimum from below, and any assignment, truly evaluated, from
above (Lagrangian relaxation of the rows ``exposed``; Geoffrion 1974). Where all messages hide, p near 0 closes the gap
at once, and where computing is short, p near 1. Between them p is bisected by which side of its window is longer; a gap
that stays (the best assignments of two prices differ) is reported like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .problem import Floats, Ints, Problem, Solution, evaluate, is_within, sides_of
from .reduce import DropForbidden
from .solve_budget import Budget
from .solve_program import build
from .solve_relaxation import round_up

# Solves a problem without windows: (problem, budget, gap, incumbents).
Plain = Callable[[Problem, Budget, float, Sequence[Ints]], Solution]
ROUNDS = 5
MOST_PAIRS = 20_000
MOST_SECONDS = 5.0
# Hidden messages cost a little, so that of two plans that hide them the one that sends less is taken.
LEAST_PRICE = 0.002
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
    """The best assignment and the best bound so far, and between which ends the price of each window lies."""

    problem: Problem
    choices: Ints = field(default_factory=lambda: NONE)
    objective: float = float("inf")
    bound: float = float("-inf")
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def offer(self, choices: Ints) -> None:
        if len(choices) and is_within(self.problem, choices):
            objective = evaluate(self.problem, choices)
            if objective < self.objective:
                self.choices, self.objective = choices, objective

    def closed(self, gap: float) -> bool:
        return self.objective - self.bound <= max(gap, 1e-6) * abs(self.objective)

    def search(self, budget: Budget, gap: float) -> None:
        """Branch and cut on the whole program, where it is small enough to get anywhere."""
        allowed, inverse = DropForbidden().apply(replace(self.problem, windows=()))
        if budget.left <= 0 or sum(t.cost.size * len(t.consumers) for t in allowed.transfers) > MOST_PAIRS:
            return
        whole = replace(allowed, windows=self.problem.windows)
        program = build(whole)
        answer = budget.branch(program, gap)
        found = round_up(whole, program, answer)
        if len(found):
            self.offer(inverse.expand(found))
        if np.isfinite(answer.bound):
            self.bound = max(self.bound, min(answer.bound, self.objective))

    def narrow(self, prices: Sequence[float], choices: Ints) -> list[float]:
        """The next prices, given the best assignment at these."""
        for index, window in enumerate(self.problem.windows):
            messages, computing = sides_of(self.problem, window, choices)
            (self.low if messages > computing else self.high)[index] = prices[index]
        return [_between(*ends) for ends in zip(prices, self.low, self.high, strict=True)]


def _between(price: float, low: float, high: float) -> float:
    """The next price. The ends come first: they decide most windows."""
    if high <= LEAST_PRICE or low >= 1.0:
        return price
    return 1.0 if price == LEAST_PRICE else (low + high) / 2


def solve_windows(
    problem: Problem, plain: Plain, *, budget: Budget, gap: float, incumbents: Sequence[Ints] = ()
) -> Solution:
    """Solves a problem with windows by ``plain``; as :func:`autopar.solve.solve` otherwise."""
    count = len(problem.windows)
    hunt = _Hunt(problem, low=[0.0] * count, high=[1.0] * count)
    for choices in incumbents:
        hunt.offer(np.asarray(choices, dtype=np.int64))
    prices = [LEAST_PRICE] * count
    for _ in range(ROUNDS):
        left = budget.left
        known = [choices for choices in (*incumbents, hunt.choices) if len(choices)]
        found = plain(at_prices(problem, prices), budget.part(0.5), 0.8 * gap, known)
        if found.status == "infeasible":
            return replace(found, seconds=budget.seconds)
        hunt.offer(found.choices)
        hunt.bound = max(hunt.bound, min(found.bound, hunt.objective))
        before, prices = prices, hunt.narrow(prices, found.choices)
        if hunt.closed(gap) or left <= 0 or prices == before:
            break
    if not hunt.closed(gap):
        hunt.search(budget.part(most=MOST_SECONDS), gap)
    status = "optimal" if hunt.closed(gap) else "feasible"
    return Solution(hunt.choices, hunt.objective, hunt.bound, status, budget.seconds)
