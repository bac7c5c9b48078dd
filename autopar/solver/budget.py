"""What a search may still spend, by one of two clocks. Neither relies on what else the machine does.

*Seconds of computing* are the processor time of this process: what a user allows (``Options.time_limit``). *Counted
work* is for the searches that planning makes by itself: steps of known cost are added up in seconds that they take on
one core of a common processor, so that the same problem has the same solution on every machine, busy or not.

HiGHS counts nodes, and nothing in the root node, where most of our programs are solved or left. By the second clock a
program is therefore only begun if its root is sure to end in what is left, and is charged by its simplex iterations. By
either clock none is begun whose relaxation alone would take longer than what is left: stopped before, it says nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from .highs import Effort, Outcome, run
from .milp import MixedIntegerProgram

# Seconds of one update of messages between two groups, and for each entry of its price (150 slots of 14 to 5000
# entries); a sweep of a descent over all groups takes about as long as one over all messages.
# Measured on two cores, November 2026.
SLOT_SECONDS, ENTRY_SECONDS = 2e-5, 7e-9
# Seconds of an interior point method at so many nonzeros, and the power with which it grows (3,000 to 53,000 nonzeros).
# Measured on two cores, November 2026.
RELAXED_SECONDS, RELAXED_NONZEROS, RELAXED_POWER = 1.2, 50_000, 1.4
# Seconds of the hardest root node for each nonzero, and of any program for each simplex iteration.
# Measured on two cores, November 2026.
ROOT_SECONDS, ITERATION_SECONDS = 3e-4, 3e-4
UNKNOWN = Outcome("unknown", np.zeros(0), float("-inf"), np.zeros(0))
# Counted work may take so many times its seconds: only where this strikes, or the guard of the
# least memory (:mod:`.solve`), may answers differ between machines.
# Chosen: machines that are eight times as slow, or as busy, still have the same answers.
GUARD = 8.0


def sweep_seconds(slots: int, entries: int) -> float:
    """What one round over all messages counts as."""
    return slots * SLOT_SECONDS + entries * ENTRY_SECONDS


def relaxed_seconds(program: MixedIntegerProgram) -> float:
    """About what the linear relaxation takes."""
    return float(RELAXED_SECONDS * (len(program.value) / RELAXED_NONZEROS) ** RELAXED_POWER)


@dataclass
class Budget:
    """``limit`` seconds of computing from when it was made, or of work if ``counted``. What a part ``of`` a budget
    spends is spent there as well."""

    limit: float
    counted: bool = False
    of: Budget | None = None
    spent: float = 0.0
    begun: float = field(default_factory=time.process_time)

    @property
    def seconds(self) -> float:
        """Seconds of computing since it was made."""
        return time.process_time() - self.begun

    @property
    def left(self) -> float:
        """Seconds, none or negative once it is spent."""
        return self.limit - self.used

    @property
    def used(self) -> float:
        """Seconds since it was made, by its own clock."""
        return self.spent if self.counted else self.seconds

    def spend(self, seconds: float) -> None:
        """Counts work that was done; the processor's time counts itself."""
        self.spent += seconds
        if self.of is not None:
            self.of.spend(seconds)

    def part(self, share: float = 1.0, most: float = float("inf")) -> Budget:
        """A budget of a share of what is left, and at most so many seconds."""
        return Budget(min(share * self.left, most), self.counted, of=self)

    def relax(self, program: MixedIntegerProgram, seed: int) -> Outcome:
        """The linear relaxation, by an interior point method: with a memory row that is several times faster than
        simplex."""
        effort = Effort(self.left, seed=seed, algorithm="BARRIER")
        needed = relaxed_seconds(program)
        if needed > self.left:
            return UNKNOWN
        if not self.counted:
            return run(program, True, effort)
        self.spend(needed)
        return run(program, True, replace(effort, time_limit=GUARD * needed))

    def simplex(self, program: MixedIntegerProgram) -> Outcome:
        """A linear program of some rows and columns, at a vertex."""
        if not self.counted:
            return run(program, True, Effort(self.left))
        if self.left <= 0:
            return UNKNOWN
        outcome = run(program, True, Effort(GUARD * self.left))
        self._charge(program, outcome)
        return outcome

    def branch(self, program: MixedIntegerProgram, gap: float, seed: int = 0) -> Outcome:
        """Branch and cut."""
        effort = Effort(self.left, gap=gap, seed=seed)
        if not self.counted:
            # Its root is at least the relaxation: a solver stopped within that has nothing to say.
            return run(program, False, effort) if relaxed_seconds(program) <= self.left else UNKNOWN
        root = ROOT_SECONDS * len(program.value)
        if root > self.left:
            return UNKNOWN
        nodes = max(1, int(self.left / root))
        outcome = run(program, False, replace(effort, time_limit=GUARD * self.left, nodes=nodes))
        self._charge(program, outcome)
        return outcome

    def _charge(self, program: MixedIntegerProgram, outcome: Outcome) -> None:
        self.spend(ITERATION_SECONDS * (outcome.iterations + len(program.value) / 100))
