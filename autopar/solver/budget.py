"""The time budget of a search, by one of two clocks. Neither depends on other load of the machine.

*CPU seconds* are the processor time of this process, which a user limits (``Options.time_limit``). *Counted work* is
for searches that planning makes by itself: steps of known cost are added up, in seconds that they take on one core of a
common processor, so that the same problem has the same solution on every machine, busy or not.

HiGHS counts nodes, but nothing within the root node, where most of our programs are solved or given up. With counted
work, a program is therefore only started if its root usually ends within the remaining budget, which the hardest may
exceed, and it is charged by its simplex iterations. With either clock, no program is started whose relaxation alone
would take longer than the remaining budget: stopped before that, it yields nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from .milp import MixedIntegerProgram
from .outcome import Effort, Outcome
from .problem import Problem

# Seconds of one update of messages between two groups, and of each entry of its price matrix (measured on 150 slots of
# 14 to 5000 entries, and on 163 to 361 slots with 14,000 to 107,000 entries under a limit of memory, where repairs make
# a sweep dearer). A sweep of a descent over all groups takes about as long as a sweep over all messages.
# Measured on two cores, November 2026.
SLOT_SECONDS, ENTRY_SECONDS = 3.2e-5, 1.1e-8
# Seconds of one reduction for each consumer of a transfer (measured on programs of 331 to 586 consumers).
# Measured on two cores, November 2026.
REDUCED_SECONDS = 3.6e-5
# Seconds of an interior point method at RELAXED_NONZEROS nonzeros, and the power with which they grow (measured at
# 3,000 to 53,000 nonzeros).
# Measured on two cores, November 2026.
RELAXED_SECONDS, RELAXED_NONZEROS, RELAXED_POWER = 1.2, 50_000, 1.4
# Seconds per nonzero of the hardest root node, and of one that takes long (six programs of 16,000 to 30,000 nonzeros
# took 0.2e-4 to 1.6e-4 with all their nodes), and seconds per simplex iteration of any program.
# Measured on two cores, November 2026.
ROOT_SECONDS, USUAL_ROOT_SECONDS, ITERATION_SECONDS = 3e-4, 1.5e-4, 3e-4
UNKNOWN = Outcome("unknown", np.zeros(0), float("-inf"), np.zeros(0))
# Counted work may take at most this many times its seconds (a program that is begun with little left, three times that,
# since the hardest root takes twice as long as the usual one). Only if this limit is reached, or that of the search for
# the least memory (:mod:`.solve`), may solutions differ between machines.
# Chosen: machines that are eight times as slow, or as busy, still have the same answers.
GUARD = 8.0


def run(program: MixedIntegerProgram, relaxed: bool, effort: Effort) -> Outcome:
    """:func:`.highs.run`, whose library is loaded when it is first needed: most programs are solved without it."""
    from .highs import run as solve

    return solve(program, relaxed, effort)


def sweep_seconds(slots: int, entries: int) -> float:
    """Counted seconds of one round over all messages."""
    return slots * SLOT_SECONDS + entries * ENTRY_SECONDS


def reduced_seconds(problem: Problem, reductions: int) -> float:
    """Counted seconds of so many reductions of a problem."""
    return REDUCED_SECONDS * reductions * sum(len(transfer.consumers) for transfer in problem.transfers)


def relaxed_seconds(nonzeros: int) -> float:
    """Estimated seconds of the linear relaxation of a program with so many nonzeros."""
    return float(RELAXED_SECONDS * (nonzeros / RELAXED_NONZEROS) ** RELAXED_POWER)


@dataclass
class Budget:
    """A budget of ``limit`` CPU seconds from its creation or, if ``counted``, of counted work. Spending from a part
    ``of`` another budget also spends from that budget."""

    limit: float
    counted: bool = False
    of: Budget | None = None
    spent: float = 0.0
    begun: float = field(default_factory=time.process_time)

    @property
    def seconds(self) -> float:
        """CPU seconds since the budget was created."""
        return time.process_time() - self.begun

    @property
    def left(self) -> float:
        """Remaining seconds; 0 or negative once the budget is spent."""
        return self.limit - self.used

    @property
    def used(self) -> float:
        """Seconds used so far, by the budget's own clock."""
        return self.spent if self.counted else self.seconds

    def spend(self, seconds: float) -> None:
        """Adds counted work. CPU time needs no counting."""
        self.spent += seconds
        if self.of is not None:
            self.of.spend(seconds)

    def part(self, share: float = 1.0, most: float = float("inf")) -> Budget:
        """A budget of a ``share`` of the remaining seconds, but at most ``most``."""
        return Budget(min(share * self.left, most), self.counted, of=self)

    def may_relax(self, nonzeros: int) -> bool:
        """Whether :meth:`relax` would begin with a program of so many nonzeros, so that it is worth building."""
        return relaxed_seconds(nonzeros) <= self.left

    def may_branch(self, nonzeros: int) -> bool:
        """As :meth:`may_relax`, for :meth:`branch`."""
        return USUAL_ROOT_SECONDS * nonzeros <= self.left if self.counted else self.may_relax(nonzeros)

    def relax(self, program: MixedIntegerProgram, seed: int) -> Outcome:
        """Solves the linear relaxation by an interior point method. For programs with a memory row, that is several
        times faster than simplex."""
        effort = Effort(self.left, seed=seed, algorithm="BARRIER")
        needed = relaxed_seconds(len(program.value))
        if not self.may_relax(len(program.value)):
            return UNKNOWN
        if not self.counted:
            return run(program, True, effort)
        self.spend(needed)
        return run(program, True, replace(effort, time_limit=GUARD * needed))

    def simplex(self, program: MixedIntegerProgram) -> Outcome:
        """Solves a small linear program; the solution is a vertex."""
        if not self.counted:
            return run(program, True, Effort(self.left))
        if self.left <= 0:
            return UNKNOWN
        outcome = run(program, True, Effort(GUARD * self.left))
        self._charge(program, outcome)
        return outcome

    def branch(self, program: MixedIntegerProgram, gap: float, seed: int = 0) -> Outcome:
        """Solves by branch and cut."""
        effort = Effort(self.left, gap=gap, seed=seed)
        if not self.may_branch(len(program.value)):
            return UNKNOWN
        if not self.counted:  # The root node takes at least as long as the relaxation, and yields nothing before.
            return run(program, False, effort)
        root = ROOT_SECONDS * len(program.value)
        nodes = max(1, int(self.left / root))
        outcome = run(program, False, replace(effort, time_limit=GUARD * max(self.left, root), nodes=nodes))
        self._charge(program, outcome)
        return outcome

    def _charge(self, program: MixedIntegerProgram, outcome: Outcome) -> None:
        self.spend(ITERATION_SECONDS * (outcome.iterations + len(program.value) / 100))
