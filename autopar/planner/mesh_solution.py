"""The solution of one mesh: choices for every group of its program, the placements that they mean, and their cost
breakdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir.assignment import Assignment
from autopar.passes.recompute.recompute import recomputed
from autopar.placement.alternatives import holdings
from autopar.placement.breakdown import CostBreakdown, cost_breakdown
from autopar.placement.formulation import Instance
from autopar.placement.memory_bound import Memory, memory
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import Prices
from autopar.placement.rooms import Room
from autopar.planner.steps.exact_memory import ExactMemory, exact_memory, is_rehearsed
from autopar.solver.problem import Ints, Solution

# What the cost breakdown of a step that saves no memory counts is at most so many times what it holds: to what rests it
# adds activations, gradients and the largest operation, which the step may hold one after the other.
COUNTED_AT_MOST = 3


@dataclass(frozen=True)
class InRoom:
    """What the devices in one ``room`` hold at their peak: ``memory`` is that of ``exact`` if the step could be
    rehearsed, otherwise a bound."""

    room: Room
    memory: Memory
    exact: ExactMemory

    @property
    def peak(self) -> int:
        return self.memory.peak


def counted_peak(rooms: Sequence[InRoom], otherwise: int) -> int:
    """The most that the devices in any of ``rooms`` hold, as it counts in the smallest; ``otherwise`` if there are
    none."""
    least = min((held.room.limit for held in rooms), default=0.0)
    return max((held.room.counted(held.peak, least) for held in rooms), default=otherwise)


@dataclass(frozen=True, eq=False)
class SolvedStep:
    """The step that ``choices`` of ``instance`` mean, what it costs and what is measured of it: each once, when it is
    first asked for. Of most solutions of a search it is not, and a rehearsal takes as long as pricing the step many
    times."""

    instance: Instance
    choices: Ints

    @cached_property
    def assignment(self) -> Assignment:
        return self.instance.assignment(self.choices)

    @cached_property
    def placed(self) -> PlacedStep:
        """With the nodes that are recomputed."""
        return placed_step(self.instance, self.assignment)

    @cached_property
    def breakdown(self) -> CostBreakdown:
        return cost_breakdown(self.placed, held=self.counted)

    @cached_property
    def counted(self) -> Memory:
        """What the cost breakdown counts."""
        return memory(self.placed)

    @cached_property
    def memory(self) -> ExactMemory:
        """The memory of the fullest device, rehearsed where possible; of several rooms, of the one that is tightest."""
        return self._exact(self.placed) if self.tightest is None else self.tightest.exact

    @cached_property
    def rooms(self) -> tuple[InRoom, ...]:
        """What the devices in each room hold, where these differ."""
        found = []
        for room in self.placed.prices.rooms:
            step = replace(self.placed, prices=self.placed.prices.in_room(room))
            exact = self._exact(step)
            found.append(InRoom(room, exact.memory or memory(step), exact))
        return tuple(found)

    @cached_property
    def tightest(self) -> InRoom | None:
        return max(self.rooms, key=lambda held: held.peak / held.room.limit, default=None)

    def _exact(self, step: PlacedStep) -> ExactMemory:
        listed = tuple(holdings(step))
        return exact_memory(step, listed) if is_rehearsed(self.instance) else ExactMemory(None, listed)


@dataclass(frozen=True)
class MeshSolution:
    """One solved mesh: the instance, the solution, and its step. ``unlimited``: a lower bound in seconds for any memory
    limit, if one is known."""

    instance: Instance
    solution: Solution
    step: SolvedStep
    unlimited: float = -math.inf

    @staticmethod
    def of(instance: Instance, solution: Solution) -> MeshSolution:
        """Reads a solution of ``instance``."""
        return MeshSolution(instance, solution, SolvedStep(instance, solution.choices))

    @property
    def assignment(self) -> Assignment:
        return self.step.assignment

    @property
    def breakdown(self) -> CostBreakdown:
        return self.step.breakdown

    @property
    def prices(self) -> Prices:
        return self.instance.prices

    @property
    def saves_memory(self) -> bool:
        """Whether values are recomputed or rest in other tiers, which is done for lack of memory alone."""
        places = self.assignment.parameters.values()
        return bool(self.assignment.recomputed or self.assignment.offloaded) or any(place.offload for place in places)


def placed_step(instance: Instance, assignment: Assignment) -> PlacedStep:
    """The step of ``instance`` under ``assignment``, with the nodes that it recomputes."""
    graph, placed = recomputed(instance.graph, assignment)
    return PlacedStep(graph, placed, instance.prices, instance.optimizer, instance.repeats)


def may_fit(solved: MeshSolution, limit: float) -> bool:
    """Whether it takes a rehearsal, which takes long, to know whether a step holds at most ``limit`` bytes."""
    return solved.saves_memory or solved.step.counted.peak <= COUNTED_AT_MOST * limit


def peak_bytes(solved: MeshSolution) -> int:
    """Peak bytes of the step, rehearsed where possible, otherwise those of its cost breakdown; of several rooms, as
    they count in the smallest."""
    step = solved.step
    if not step.rooms:
        return ((step.memory.memory if is_rehearsed(step.instance) else None) or step.counted).peak
    return counted_peak(step.rooms, 0)
