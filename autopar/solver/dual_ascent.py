"""The state of the search, and its first and usually last phase: message passing with rounding, until the gap closes or
the ascent stalls."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .budget import Budget, sweep_seconds
from .coordinate_descent import Neighbourhood, fits, polish, repair, smallest
from .message_passing import Messages
from .problem import Floats, Ints, Problem, evaluate, host_of, is_within, memory_of
from .reduce import Chain

NONE = np.zeros(0, dtype=np.int64)
# Relative. Chosen: that of the solvers, whose feasibility tolerances are 1e-7 to 1e-6.
TOLERANCE = 1e-6
# Sweeps between two looks at the choices. Chosen: looking costs about as much as five sweeps (POLISHING).
_BATCH = 20
# Sweeps of a climb. Chosen; a stall ends it earlier.
SWEEPS = 400
# The work of polishing decoded choices, and of repairing them, in sweeps.
# Chosen: each makes at most this many descents of a few sweeps.
POLISHING, _REPAIRING = 5, 30


@dataclass
class Search:
    """The state of one solve: best choices of the original problem so far and the best proven bound."""

    problem: Problem
    budget: Budget
    gap: float
    seed: int
    choices: Ints = field(default_factory=lambda: NONE)
    objective: float = float("inf")
    bound: float = float("-inf")
    # Assignments that reduced-cost fixing dropped cost at least this much. A bound of the remaining problem counts only
    # up to here.
    floor: float = float("inf")
    # Everything was searched and nothing fits.
    exhausted: bool = False
    # The search may stop at an assignment that costs at most this.
    enough: float = float("-inf")
    # Assignments that cost at least this much are of no use.
    worth: float = float("inf")
    # All that were the cheapest so far.
    met: list[Ints] = field(default_factory=list)
    # About what a byte is worth in seconds under the limit of memory; 0: not known.
    memory_price: float = 0.0

    @property
    def left(self) -> float:
        """Remaining seconds of the budget, CPU time or counted work."""
        return self.budget.left

    @property
    def has_incumbent(self) -> bool:
        """Whether an assignment that fits has been found."""
        return bool(np.isfinite(self.objective))

    @property
    def closed(self) -> bool:
        """Whether the gap is proven, up to the tolerance of the solvers."""
        return self.has_incumbent and self.objective - self.bound <= max(self.gap, TOLERANCE) * abs(self.objective)

    @property
    def is_hopeless(self) -> bool:
        """Whether it is proven that no assignment is of use."""
        return self.worth <= self.bound and bool(np.isfinite(self.worth))

    @property
    def over(self) -> bool:
        """Whether to stop: the gap is closed, enough was found, nothing of use is left, or the budget is spent."""
        return self.closed or self.objective <= self.enough or self.is_hopeless or self.left <= 0

    def offer(self, choices: Ints | None) -> None:
        """Keeps ``choices`` (of the original problem) if they fit and are the cheapest so far."""
        if choices is None or not is_within(self.problem, choices):
            return
        objective = evaluate(self.problem, choices)
        if objective < self.objective:
            self.choices, self.objective = choices, objective
            self.met.append(choices)
            self.bound = min(self.bound, objective)

    def prove(self, bound: float) -> None:
        """Raises the bound, but not above the floor or the incumbent. A value above the incumbent is rounding error, or
        means that nothing beats the incumbent."""
        if not np.isnan(bound):
            self.bound = max(self.bound, min(bound, self.floor, self.objective))


@dataclass(frozen=True, eq=False)
class Ascent:
    """The result of message passing on a reduced problem: its bound, and the slack of every choice above the bound."""

    bound: float
    slack: tuple[Floats, ...]


@dataclass(eq=False)
class _Climber:
    """One ascent. ``chain`` maps choices back to the original problem."""

    search: Search
    problem: Problem
    chain: Chain
    neighbourhood: Neighbourhood
    messages: Messages
    best: Ascent

    def spend(self, sweeps: int) -> None:
        """Counts the work of this many sweeps."""
        slots = self.messages.slots
        self.search.budget.spend(sweeps * sweep_seconds(len(slots), sum(slot.share.size for slot in slots)))

    def record(self) -> None:
        bound = self.messages.bound
        self.search.prove(bound + self.chain.offset)
        if bound > self.best.bound:
            self.best = Ascent(bound, self.messages.slack())
            self.search.memory_price = self.messages.price or self.search.memory_price

    def offer(self, choices: Ints | None) -> None:
        """Polishes and offers ``choices`` if they fit. Otherwise, without a limit of device memory, descends from them
        to an assignment that fits."""
        if choices is None:
            return
        if fits(self.problem, choices):
            self.search.offer(self.chain.expand(polish(self.neighbourhood, choices)))
        elif np.isinf(self.problem.memory_limit):
            repaired = repair(self.neighbourhood, choices)
            self.search.offer(None if repaired is None else self.chain.expand(repaired))

    def start(self, choices: Ints) -> None:
        """Offers ``choices`` of least device memory, repaired first if they exceed host memory."""
        if host_of(self.problem, choices) > self.problem.host_limit:
            self.search.offer(_expanded(self.chain, repair(self.neighbourhood, choices, rounds=4)))
        else:
            self.offer(choices)

    def climb(self, sweeps: int) -> Ints:
        """Sweeps until the bound stalls. Returns the decoded choices."""
        choices, last = self.messages.decode(), self.messages.bound
        for _ in range(0, sweeps, _BATCH):
            self.messages.sweep(_BATCH)
            self.spend(_BATCH + POLISHING)
            choices = self.messages.decode()
            self.offer(choices)
            self.record()
            gain, last = self.messages.bound - last, self.messages.bound
            distance = self.search.objective - self.chain.offset - last
            # A stall: at this rate a hundred more batches would not close the gap.
            if self.search.over or gain * 100 < min(distance, abs(last)):
                break
        return choices

    def first_price(self) -> float:
        """The price of memory to begin with, where none is known: 0 if the choices that are cheapest without it fit."""
        cheapest = self.messages.cheapest()
        above = memory_of(self.problem, cheapest) - self.problem.memory_limit
        if above <= 0:
            self.offer(cheapest)
            return 0.0
        distance = self.search.objective - self.chain.offset - self.messages.bound
        return (distance if np.isfinite(distance) else abs(self.messages.bound)) / max(above, 1.0) + 1e-300

    def price_memory(self, price: float, sweeps: int, steps: int = 3) -> None:
        """Searches for the price of memory with the highest bound, from ``price`` on, where it makes as many
        ``sweeps``: upwards until the bound no longer rises, then by bisection, in a few ``steps``. The exact
        relaxation, which follows, knows it better: of thirteen programs of GPTs of 96 and 128 layers, three steps took
        a sixth less in all than fourteen, and found nothing worse."""
        low, high = 0.0, float("inf")
        for step in range(steps):
            self.messages.set_price(price)
            choices = self.climb(sweeps if step == 0 else 3 * _BATCH)
            if self.search.over:
                return
            if not fits(self.problem, choices):
                self.search.offer(_expanded(self.chain, repair(self.neighbourhood, choices, rounds=4)))
                self.spend(_REPAIRING)
            if self.messages.excess > 0:
                low = price
            else:
                high = price
            price = low * 2 if np.isinf(high) else high / 4 if low == 0 else float(np.sqrt(low * high))
            # Chosen: within 2% prices have nearly the same bound.
            if low > 0 and high < low * 1.02:
                break


def _expanded(chain: Chain, choices: Ints | None) -> Ints | None:
    return None if choices is None else chain.expand(choices)


def ascend(search: Search, problem: Problem, chain: Chain) -> Ascent:
    """Raises the bound of ``search`` by message passing on the reduced ``problem``, and offers the decoded choices."""
    messages = Messages(problem)
    nothing = tuple(np.zeros(len(group.cost)) for group in problem.groups)
    climber = _Climber(search, problem, chain, Neighbourhood.of(problem), messages, Ascent(-np.inf, nothing))
    climber.record()
    if np.isfinite(problem.memory_limit):
        climber.start(smallest(problem))
    climber.offer(chain.restrict(search.choices) if search.has_incumbent else None)
    if np.isfinite(problem.memory_limit) and search.memory_price > 0.0:
        climber.price_memory(search.memory_price, SWEEPS)
        return climber.best
    climber.climb(SWEEPS)
    if np.isfinite(problem.memory_limit) and not search.over:
        price = climber.first_price()
        if price > 0.0:
            climber.price_memory(price, 3 * _BATCH)
    return climber.best
