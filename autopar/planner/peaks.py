"""What solved steps hold at their memory peak: measured where it is to be known, estimated where it only guides a
search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE
from autopar.placement.formulation import Instance
from autopar.placement.placed_step import PlacedStep
from autopar.planner.steps.exact_memory import is_rehearsed
from autopar.planner.steps.short_rehearsal import ShortGraphs, estimated_peak, short_graphs
from autopar.solver.problem import Solution, memory_of

from .memory_limit import SPARE, Needed
from .mesh_solution import MeshSolution, SolvedStep, may_fit, peak_bytes
from .request import PlanRequest, memory_limit_of

# The share of the limit above which a step in microbatches is rehearsed at all.
# Chosen: a rehearsal takes longer than a price, and a price is not wrong by half. (Of a step of one pass it is needed
# anyway, if it is chosen.)
NEAR = 0.5
# The nodes of a graph whose step is estimated. Chosen: steps of fewer are rehearsed within a second.
LEAST_NODES = 4000
# Steps of large graphs that are kept for other plans. Chosen: the quickest of two programs; each takes some 50 MB.
STEPS = 2
Key = tuple[int, bytes]


@dataclass
class Peaks:
    """The peaks of the steps of one ``request``. ``lacking``: the bytes that the estimate of the last step that was
    measured lacked, which are added to others."""

    request: PlanRequest
    lacking: int = 0
    _exact: dict[Key, int] = field(default_factory=dict)
    _estimates: dict[Key, int | None] = field(default_factory=dict)
    _graphs: dict[int, Graph] = field(default_factory=dict)

    @property
    def allowed(self) -> float:
        return float(memory_limit_of(self.request))

    def solution(self, instance: Instance, solution: Solution) -> MeshSolution:
        """Reads a solution of ``instance``, with what other plans have measured of its step: an earlier search of the
        same request, or one under another limit."""
        of, choices = (instance.graph, instance.prices, instance.choices), solution.choices
        make = partial(SolvedStep, instance, choices)
        settings = instance.optimizer, instance.repeats, choices.tobytes()
        return MeshSolution(instance, solution, self.request.shared.once("steps", of, *settings, make=make, kept=STEPS))

    def exact(self, solved: MeshSolution) -> int:
        """Peak bytes as measured (:func:`.peak_bytes`), or those that the program counts if only these matter: where
        the caller seeks the limit of its row, so that nothing else may decide whether a solution is within it."""
        if self.request.only_counted:
            return math.floor(memory_of(solved.instance.problem, solved.solution.choices))
        key = self._key(solved)
        if key not in self._exact:
            known, choices = self._known(solved), solved.solution.choices.tobytes()
            if choices not in known:
                known[choices] = peak_bytes(solved)
            self._exact[key] = known[choices]
            estimate = self._estimates.get(key)
            self.lacking = self.lacking if estimate is None else self._exact[key] - estimate
        return self._exact[key]

    def about(self, solved: MeshSolution) -> int:
        """Peak bytes: measured if they are known, or cannot be estimated; otherwise an estimate."""
        estimate = None if self._key(solved) in self._exact else self._estimate(solved)
        return self.exact(solved) if estimate is None else estimate + self.lacking

    def seems_to_fit(self, solved: MeshSolution) -> bool:
        return self.about(solved) <= self.allowed

    def fits(self, solved: MeshSolution) -> bool:
        """Whether the step fits: measured, unless estimates or what the program counts rule it out."""
        if solved.instance.repeats != ONCE and solved.step.counted.peak < NEAR * self.allowed:
            return True
        if not may_fit(solved, self.allowed):
            return False
        # A step of which the program counts no more will probably fit: no need to estimate it first.
        return (solved.step.counted.peak <= self.allowed or self.seems_to_fit(solved)) and (
            self.exact(solved) <= self.allowed
        )

    def may_err(self, solved: MeshSolution) -> bool:
        """Whether a step that was said not to fit may fit, for all that is known of how far estimates are off."""
        return may_fit(solved, self.allowed) and (self.seems_to_fit(solved) or abs(self.lacking) > SPARE * self.allowed)

    def needed(self, solved: MeshSolution) -> Needed:
        return Needed(memory_of(solved.instance.problem, solved.solution.choices), self.about(solved))

    def are_counted(self, solved: MeshSolution) -> bool:
        """Whether the bytes of a step are those that the program counts."""
        return not is_rehearsed(solved.instance)

    def _known(self, solved: MeshSolution) -> dict[bytes, int]:
        """The peaks that are known of a program's choices, whatever the limit of memory was."""
        of = solved.instance.graph, solved.instance.prices, solved.instance.choices
        return self.request.shared.once("peaks", of, make=dict[bytes, int])

    def _key(self, solved: MeshSolution) -> Key:
        graph = self._graphs.setdefault(id(solved.instance.graph), solved.instance.graph)  # Kept: its identity is.
        return id(graph), solved.solution.choices.tobytes()

    def _estimate(self, solved: MeshSolution) -> int | None:
        key = self._key(solved)
        if key not in self._estimates:
            short = self._short(solved)
            self._estimates[key] = None if short is None else estimated_peak(_plain(solved), short)
        return self._estimates[key]

    def _short(self, solved: MeshSolution) -> ShortGraphs | None:
        """The short graphs of a step; None if it has none, or is that of devices in several rooms."""
        graph = solved.instance.graph
        is_short = len(graph) < LEAST_NODES or solved.instance.repeats != ONCE
        if is_short or solved.prices.rooms or not is_rehearsed(solved.instance):
            return None
        return self.request.shared.once("short graphs", (graph,), make=lambda: short_graphs(graph))


def _plain(solved: MeshSolution) -> PlacedStep:
    """The step without the copies of what it recomputes."""
    of = solved.instance
    return PlacedStep(of.graph, solved.assignment, of.prices, of.optimizer, of.repeats)
