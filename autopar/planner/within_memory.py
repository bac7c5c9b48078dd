"""Solves a placement program with limits of memory, as the program counts it, until its step fits and leaves little
unused.

Until a step is found that may be the best, peaks are estimated (:class:`.Peaks`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.placement.formulation import Instance
from autopar.solver.problem import Ints, Solution

from .memory_limit import (
    MORE_ROUNDS,
    ROUNDS,
    SPARE,
    Needed,
    Solve,
    first_limit,
    next_limit,
    solve_wide,
    with_limit,
)
from .mesh_solution import MeshSolution
from .peaks import Peaks
from .request import PlanRequest

# How often what is found by wrong estimates is improved. Chosen: the second estimates have learned from the first.
RETRIED = 1


@dataclass(frozen=True)
class WithinMemory:
    """``solve`` solves the programs of ``request``, whose steps have these ``peaks``. ``unlimited``: seconds without a
    limit of memory, minus infinity if they are not known."""

    request: PlanRequest
    peaks: Peaks
    solve: Solve
    unlimited: float

    def best(self, instance: Instance, beyond: Needed | None, starts: Sequence[Ints]) -> MeshSolution | None:
        """The best solution of ``instance`` that is found to fit. ``beyond``: what a solution needs that does not, if
        one is known; ``starts``: choices of the program without recomputation and offload."""
        limit, solve = first_limit(self.peaks.allowed, beyond), self._wide(starts)
        for _ in range(ROUNDS):
            found, beyond = self._until_fits(instance, limit, beyond, solve)
            if found is None:
                return None
            best = self._quickest_that_fits(found, beyond)
            if best is not None:
                return best
            # Measured by now, and too large, though it did not seem to be.
            beyond = self.peaks.needed(found)
            limit, solve = next_limit(self.peaks.allowed, beyond, None), self.solve
        return None

    def best_from(self, fitting: MeshSolution) -> MeshSolution:
        """``fitting``, or a quicker solution that is found to fit."""
        return self._quickest_that_fits(fitting, None) or fitting

    def _wide(self, starts: Sequence[Ints]) -> Solve:
        def solve(instance: Instance, _: Sequence[Ints]) -> Solution:
            return solve_wide(instance, self.solve, starts)

        return solve

    def _until_fits(
        self, instance: Instance, limit: float, beyond: Needed | None, solve: Solve
    ) -> tuple[MeshSolution | None, Needed | None]:
        """Solves ``instance``, first with ``limit`` and then with less memory until the step seems to fit. Returns the
        solution that does, and what the last that does not needs, if there are any."""
        for _ in range(ROUNDS):
            limited = with_limit(instance, limit)
            solution = solve(limited, ())
            if solution.status == "infeasible":
                break
            found = MeshSolution.of(limited, solution)
            if self.peaks.seems_to_fit(found):
                return found, beyond
            beyond = self.peaks.needed(found)
            limit, solve = next_limit(self.peaks.allowed, beyond, None), self.solve
        return None, beyond

    def _quickest_that_fits(self, first: MeshSolution, beyond: Needed | None) -> MeshSolution | None:
        """The quickest of ``first`` and of what is found with more memory that fits, as measured; None if none does."""
        best: MeshSolution | None = first
        for _ in range(1 + RETRIED):
            assert best is not None
            lacked, found = self.peaks.lacking, [best, *self._with_more(best, beyond)]
            quickest = sorted(found, key=lambda solved: solved.solution.objective)
            best = next((solved for solved in quickest if self.peaks.exact(solved) <= self.peaks.allowed), None)
            # If estimates were far off, more or less memory may have been left than they said.
            if best is None or abs(self.peaks.lacking - lacked) <= SPARE * self.peaks.allowed:
                break
        return best

    def _with_more(self, best: MeshSolution, beyond: Needed | None) -> Iterator[MeshSolution]:
        """Solutions with more memory than ``best`` needs that seem to fit, as long as the limit costs time and memory
        is left. ``beyond``: what a solution needs that does not fit. If steps are not rehearsed, nothing is left that
        the program does not count."""
        if self.peaks.are_counted(best):
            return
        within = self.peaks.needed(best)
        if np.isfinite(best.instance.problem.memory_limit):  # Nothing that the program counts within that is quicker.
            within = replace(within, counted=max(within.counted, best.instance.problem.memory_limit))
        for _ in range(MORE_ROUNDS):
            limit = next_limit(self.peaks.allowed, beyond, within)
            costs = best.solution.objective - self.unlimited > self.request.options.gap * best.solution.objective
            if not costs or limit - within.counted < SPARE * self.peaks.allowed:
                break
            limited = with_limit(best.instance, limit)
            solution = self.solve(limited, [best.solution.choices])
            # Within the gap of the solver nothing else is quicker, and with still more memory it will hardly be.
            is_same = solution.status != "infeasible" and np.array_equal(solution.choices, best.solution.choices)
            if solution.status == "infeasible" or is_same:
                break
            found = MeshSolution.of(limited, solution)
            if self.peaks.seems_to_fit(found):
                within = Needed(limit, self.peaks.about(found))
                best = min(found, best, key=lambda own: own.solution.objective)
                yield found
            else:
                beyond = self.peaks.needed(found)
