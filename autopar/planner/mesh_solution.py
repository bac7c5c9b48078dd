"""The solution of one mesh: choices for every group of its program, the placements that they mean, and their cost
breakdown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.assignment import Assignment
from autopar.passes.recompute.recompute import recomputed
from autopar.placement.alternatives import holdings
from autopar.placement.breakdown import CostBreakdown, cost_breakdown
from autopar.placement.formulation import Instance
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import Prices
from autopar.solver.problem import Solution

from .rehearsed_memory import ExactMemory, exact_memory


@dataclass(frozen=True, eq=False)
class SolvedStep:
    """The step of a solution, and what is measured of it: once, when it is first asked for, since a rehearsal takes as
    long as pricing the step many times."""

    instance: Instance
    placed: PlacedStep

    @cached_property
    def memory(self) -> ExactMemory:
        """Its memory, rehearsed where possible."""
        return exact_memory(self.placed.graph, self.placed.assignment, self.instance, tuple(holdings(self.placed)))


@dataclass(frozen=True)
class MeshSolution:
    """One solved mesh: the instance, the solution, its step, and its cost breakdown. ``unlimited``: a lower bound in
    seconds for any memory limit, if one is known."""

    instance: Instance
    solution: Solution
    assignment: Assignment
    step: SolvedStep
    breakdown: CostBreakdown
    unlimited: float = -math.inf

    @staticmethod
    def of(instance: Instance, solution: Solution) -> MeshSolution:
        """Reads a solution of ``instance``: derives its assignment and its cost."""
        assignment = instance.assignment(solution.choices)
        placed = placed_step(instance, assignment)
        return MeshSolution(instance, solution, assignment, SolvedStep(instance, placed), cost_breakdown(placed))

    @property
    def prices(self) -> Prices:
        return self.instance.prices


def placed_step(instance: Instance, assignment: Assignment) -> PlacedStep:
    """The step of ``instance`` under ``assignment``, with the nodes that it recomputes."""
    graph, placed = recomputed(instance.graph, assignment)
    return PlacedStep(graph, placed, instance.prices, instance.optimizer, instance.repeats)


def peak_bytes(solved: MeshSolution) -> int:
    """Peak bytes of the step, rehearsed where possible, otherwise those of its cost breakdown."""
    return (solved.step.memory.memory or solved.breakdown.memory).peak
