"""Solves a placement program with limits of memory, as the program counts it, until its step fits and leaves little
unused.

Until a step is found that may be the best, peaks are estimated (:class:`.Peaks`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.placement.formulation import Instance
from autopar.solver.least_memory import least_bound
from autopar.solver.problem import Ints, Solution, evaluate

from .fewest_bytes import may_fit_at_least
from .formulate import with_memory_savers
from .memory_limit import (
    MORE_ROUNDS,
    ROUNDS,
    SPARE,
    Needed,
    ShortOfMemoryError,
    Solve,
    Unlimited,
    first_limit,
    next_limit,
    seconds_with_savers,
    solve_wide,
    with_limit,
)
from .mesh_solution import MeshSolution
from .peaks import LEAST_NODES, Peaks
from .request import PlanRequest, asked_mesh

# How often a search with wrong estimates goes on. Chosen: the second estimates have learned from the first.
RETRIED = 1
# The share of the gap by which memory that is left must make a step quicker, by its price, to be worth another solve.
# Chosen: of GPT-3 without stages, two solves for 0.3% and 0.1% made the step 0.01% quicker.
BUYS_LITTLE = 0.5
# How many of the assignments met by solvers are measured: of steps that are rehearsed within a second, and of others.
# Chosen: halving finds the place among some sixty of them in six.
MEASURED, MEASURED_OF_LARGE = 6, 2


@dataclass
class MetSolutions:
    """The assignments of one program, with any limit of memory, that its solvers began with or met on their way.

    The program counts other bytes than a step holds, so that what a solver leaves for something cheaper may be the
    quickest that fits."""

    known: dict[bytes, Ints] = field(default_factory=dict)

    def recorded(self, solve: Solve) -> Solve:
        """``solve``, of which what it meets is kept."""

        def run(instance: Instance, incumbents: Sequence[Ints]) -> Solution:
            solution = solve(instance, incumbents)
            for choices in (*incumbents, *solution.met):
                self.known.setdefault(np.asarray(choices).tobytes(), choices)
            return solution

        return run

    def quickest(self, best: MeshSolution, peaks: Peaks) -> MeshSolution:
        """The quickest of ``best``, which fits, and of those that were met, are quicker by more than the gap, and
        fit."""
        least = best.solution.objective * (1.0 - peaks.request.options.gap)
        return self.quicker(best.instance, least, peaks) or best

    def quicker(self, instance: Instance, seconds: float, peaks: Peaks) -> MeshSolution | None:
        """The quickest found of those that were met, take less than so many ``seconds``, and fit; None if there is
        none. Mostly the quicker need more memory, so that the place where they begin to fit is sought by halving."""
        found: MeshSolution | None = None
        priced = [(evaluate(instance.problem, choices), key) for key, choices in self.known.items()]
        quicker = sorted((own, key) for own, key in priced if own < seconds)
        low, high = 0, len(quicker)
        for _ in range(MEASURED if len(instance.graph) < LEAST_NODES else MEASURED_OF_LARGE):
            if low == high:
                break
            middle = (low + high) // 2
            objective, key = quicker[middle]
            own = Solution(self.known[key], objective, -math.inf, "feasible", 0.0)
            solved = MeshSolution.of(with_limit(instance, math.inf), own)
            if peaks.fits(solved):
                found, high = solved, middle
            else:
                low = middle + 1
        return found


def take_cheapest(peaks: Peaks, best: MeshSolution, others: Sequence[Solution]) -> MeshSolution:
    """Takes the cheapest solution. A baseline that fits and beats the solver's solution replaces it and retains the
    solver's bound."""
    for other in sorted(others, key=lambda solution: solution.objective):
        if other.objective >= best.solution.objective:
            break
        # What a baseline does may be impossible in the program that was solved.
        if math.isfinite(evaluate(best.instance.problem, other.choices)):
            same = replace(best.solution, choices=other.choices, objective=other.objective, status="feasible")
            cheaper = peaks.solution(best.instance, same)
            if peaks.fits(cheaper):
                return cheaper
    return best


def short_of_memory(
    peaks: Peaks, free: Unlimited, quickest: MeshSolution | None, others: Sequence[Solution]
) -> ShortOfMemoryError:
    """Says that the ``quickest`` of a program without a limit, which is ``free``, does not fit. ``others``: solutions
    of the program without recomputation and offload."""

    def with_savers() -> float:
        if quickest is None or free.instance.is_wide:  # What is required to save memory does so already.
            return math.inf
        wide = with_memory_savers(peaks.request, free.instance)
        known = [free.solution.choices, *(other.choices for other in others)]
        return seconds_with_savers(wide, peaks.needed(quickest), peaks.allowed, known)

    what = f"the quickest placements on mesh {asked_mesh(peaks.request)}"
    return ShortOfMemoryError(what, free.solution.objective, with_savers)


def peak_at(counted: float, before: Needed | None, beyond: Needed) -> float:
    """The peak of a solution that counts so many bytes, fewer than ``beyond``, if it goes on falling as it fell from
    ``before`` to ``beyond``; minus infinity if it is not known how it falls.

    >>> peak_at(100, Needed(200, 190), Needed(150, 170))
    150.0
    """
    if before is None or before.counted <= beyond.counted:
        return -math.inf
    slope = max((before.peak - beyond.peak) / (before.counted - beyond.counted), 0.0)
    return beyond.peak - slope * (beyond.counted - counted)


@dataclass(frozen=True)
class WithinMemory:
    """``solve`` solves the programs of ``request``, whose steps have these ``peaks``; ``refining`` returns what solves
    them again with another limit, after a solution that took so many seconds. ``unlimited``: the solution without a
    limit of memory."""

    request: PlanRequest
    peaks: Peaks
    solve: Solve
    refining: Callable[[float], Solve]
    unlimited: Unlimited

    def best(
        self, instance: Instance, beyond: Needed | None, starts: Sequence[Ints]
    ) -> tuple[MeshSolution | None, Needed | None]:
        """The best solution of ``instance`` that is found to fit, and what the last that does not fit needs, if they
        are known. ``beyond``: as the latter, before; ``starts``: choices of the program without recomputation and
        offload."""
        rounds = iter(range(ROUNDS + RETRIED))
        limit, solve = first_limit(self.peaks.allowed, beyond), self._wide(starts)
        while True:
            found, beyond = self._until_fits(instance, limit, beyond, solve, rounds)
            best = None if found is None else self.quickest_that_fits(found, beyond)
            if found is None or best is not None:
                return best, beyond
            # Measured by now, and too large, though it did not seem to be.
            beyond = self.peaks.needed(found)
            limit, solve = next_limit(self.peaks.allowed, beyond, None), self.solve

    def _wide(self, starts: Sequence[Ints]) -> Solve:
        def solve(instance: Instance, _: Sequence[Ints]) -> Solution:
            return solve_wide(instance, self.solve, starts)

        return solve

    def _until_fits(
        self, instance: Instance, limit: float, beyond: Needed | None, solve: Solve, rounds: Iterator[int]
    ) -> tuple[MeshSolution | None, Needed | None]:
        """Solves ``instance``, first with ``limit`` and then with less memory until the step seems to fit, as long as
        there are ``rounds`` and anything may fit. Returns the solution that does, and what the last that does not
        needs, if there are any."""
        floor, first, price = least_bound(instance.problem), 0.0, 0.0
        for _ in rounds:
            if limit < floor and beyond is not None:
                # The peak falls by more than what is counted, so that the difference of peaks led too low.
                limit = (floor + beyond.counted) / 2
            limited = with_limit(instance, limit, price)
            solution = solve(limited, ())
            if solution.status == "infeasible":
                break
            found = MeshSolution.of(limited, solution)
            if self.peaks.seems_to_fit(found):
                return found, beyond
            before, beyond = beyond, self.peaks.needed(found)
            first, price = first or solution.seconds, solution.memory_price
            limit, solve = next_limit(self.peaks.allowed, beyond, None), self.refining(first)
            is_doubtful = limit < floor or peak_at(floor, before, beyond) > self.peaks.allowed
            if is_doubtful and not may_fit_at_least(self.request, instance):
                break
        return None, beyond

    def quickest_that_fits(self, best: MeshSolution, beyond: Needed | None) -> MeshSolution | None:
        """The quickest of ``best`` and of what is found with more memory that fits, as measured; None if none does.
        ``beyond``: what a solution needs that does not fit."""
        for _ in range(1 + RETRIED):
            lacked, found = self.peaks.lacking, [best, *self._with_more(best, beyond)]
            quickest = sorted(found, key=lambda solved: solved.solution.objective)
            fitting = next((solved for solved in quickest if self.peaks.exact(solved) <= self.peaks.allowed), None)
            # If estimates were far off, more or less memory may have been left than they said.
            if fitting is None or abs(self.peaks.lacking - lacked) <= SPARE * self.peaks.allowed:
                return fitting
            best = fitting
        return best

    def _with_more(self, best: MeshSolution, beyond: Needed | None) -> Iterator[MeshSolution]:
        """Solutions with more memory than ``best`` needs that seem to fit, as long as the limit costs time and memory
        is left. ``beyond``: what a solution needs that does not fit. If steps are not rehearsed, nothing is left that
        the program does not count."""
        if self.peaks.are_counted(best):
            return
        within, solve = self.peaks.needed(best), self.refining(best.solution.seconds)
        if np.isfinite(best.instance.problem.memory_limit):  # Nothing that the program counts within that is quicker.
            within = replace(within, counted=max(within.counted, best.instance.problem.memory_limit))
        for _ in range(MORE_ROUNDS):
            limit = next_limit(self.peaks.allowed, beyond, within)
            costs = self.unlimited.costs_of_limit(best.solution) > self.request.options.gap
            more = limit - within.counted
            if not costs or more < SPARE * self.peaks.allowed or self._buys_little(best, more):
                break
            limited = with_limit(best.instance, limit, best.solution.memory_price)
            solution = solve(limited, [best.solution.choices])
            if solution.status == "infeasible":
                break
            if np.array_equal(solution.choices, best.solution.choices):
                break  # Chosen: a still higher limit mostly has the same solution, and costs another solve.
            found = MeshSolution.of(limited, solution)
            if self.peaks.seems_to_fit(found):
                within = Needed(limit, self.peaks.about(found))
                best = min(found, best, key=lambda own: own.solution.objective)
                yield found
            else:
                beyond = self.peaks.needed(found)

    def _buys_little(self, best: MeshSolution, more: float) -> bool:
        """Whether so many bytes more are not worth another solve, by their price."""
        gained = best.solution.memory_price * more
        return 0.0 < gained < BUYS_LITTLE * self.request.options.gap * best.solution.objective
