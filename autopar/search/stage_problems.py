"""Solves the placement programs of one pipeline. They place the uncut graph on the mesh inside a stage, for all stages
together: one program for equal stages, and one for each kind of unequal ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.passes.annotate.few_layers import FewLayers
from autopar.passes.annotate.omit_layers import Stack, number_in
from autopar.placement.breakdown import hidden_lines
from autopar.placement.overlap_windows import OverlapWindow, windows_of
from autopar.planner.memory_limit import ShortOfMemoryError, TooSlowError
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import UNLIMITED, PlanRequest, mesh_candidates
from autopar.planner.row_shares import Division, bisected, divisions, divisions_by_memory, on_mesh
from autopar.planner.solve_mesh import is_short_of_memory, solve_only
from autopar.planner.timings import Timings

from .rehearsed_memory import is_soon_rehearsed
from .stage_devices import kinds_of_blocks
from .stage_meshes import StageLayout

# A stage may take less than its share of the program's bound, by up to this factor: the program overlaps messages with
# the computation of all stages, a cost breakdown with that of one (4% apart in seven of eight plans, 11% in the other).
SAFETY_FACTOR = 1.15

# The most nodes of a graph whose program is solved under a limit of memory as if stages held the average.
# Chosen: of 16,000 nodes (GPT of 128 layers) that took a third of the search for a pipeline, and no stages fitted.
MOST_NODES = 10_000


@dataclass
class StagePrograms:
    """The placement programs for ``request`` (for the mesh inside a stage of ``layout``). A pipeline is searched again
    with less memory only while it could be quicker than ``best`` seconds, and at all only while it could be worth its
    while (``request.worth``). Only the first search asks that: with less memory, quicker stages may be missing."""

    request: PlanRequest
    layout: StageLayout
    best: float
    timings: Timings
    _least: float = field(default=0.0, init=False)
    _is_first: bool = field(default=True, init=False)

    def solve(
        self, graph: Graph, repeats: Repeats, limit: float, host: float, slowest: float = math.inf
    ) -> tuple[MeshSolution, ...]:
        """The best solution for each stage within ``limit`` bytes, summed over the devices of all stages, and ``host``
        bytes of their hosts. ``slowest``: seconds of the program from which on it is of no use.

        All stages share the work of a step, so at least one of equal stages takes its share of the seconds without a
        memory limit; a lower limit makes nothing quicker. Raises :class:`InfeasibleError` if nothing fits, or if an
        earlier solution shows that no pipeline can beat ``best``; :class:`ShortOfMemoryError` if stages that hold the
        average would have to save memory, and the graph is too large to ask how."""
        if self._least > SAFETY_FACTOR * self.best:
            raise TooSlowError(self.layout.described, self._least, is_proven=False, is_least=True)
        worth = min(self._worth, slowest)
        self._is_first &= math.isinf(limit)
        only_quickest, only_counted = self._asks_only_quickest(graph, repeats), self._is_rehearsed(graph, repeats)
        asked = replace(self.request, only_quickest=only_quickest, only_counted=only_counted, worth=worth)
        found = self._of_kinds(asked, graph, repeats, limit, host)
        self._least = self._share([solution for each in found.values() for solution in each])
        return self._quickest_of(found)

    def too_large(self, graph: Graph, repeats: Repeats, limit: float, host: float) -> tuple[MeshSolution, ...] | None:
        """The quickest solution for each stage with as much memory as it takes; None if it fits within ``limit`` and
        ``host``, as for :meth:`solve`, if there is none, or if devices differ."""
        if self.request.cluster.groups:
            return None
        asked = replace(self.request, only_quickest=True, worth=math.inf)
        try:
            self._of_kinds(asked, graph, repeats, limit, host)
        except ShortOfMemoryError:
            return self._quickest_of(self._of_kinds(asked, graph, repeats, math.inf, host))
        except InfeasibleError:
            return None
        return None

    @property
    def _kinds(self) -> tuple[int, ...]:
        """The kind of each stage, by rank."""
        blocks = self.layout.blocks
        return kinds_of_blocks(self.request.cluster, blocks) if self.layout.is_unequal else (0,) * len(blocks)

    def _of_kinds(
        self, asked: PlanRequest, graph: Graph, repeats: Repeats, limit: float, host: float
    ) -> dict[int, list[MeshSolution]]:
        """The solutions of every division, for each kind of stage."""
        found: dict[int, list[MeshSolution]] = {}
        for kind in dict.fromkeys(self._kinds):
            inside, devices = self._inside(asked, kind), self.layout.sizes[kind]
            bytes_each = limit / devices if math.isfinite(limit) else UNLIMITED
            limited = replace(inside, repeats=repeats, memory_limit=bytes_each, host_limit=host / devices)
            found[kind] = self._in_divisions(inside, limited, graph)
        return found

    def _quickest_of(self, found: Mapping[int, Sequence[MeshSolution]]) -> tuple[MeshSolution, ...]:
        """The quickest solution for each stage, by rank."""
        quickest = {kind: min(each, key=lambda solution: solution.breakdown.seconds) for kind, each in found.items()}
        return tuple(quickest[kind] for kind in self._kinds)

    def quick_price(self, few: Graph, whole: Graph, stacks: Sequence[Stack], repeats: Repeats) -> float:
        """Seconds that equal stages take for a step: an estimate from the program of ``few`` layers, which lack layers
        of ``stacks`` that the ``whole`` step has, without a limit of memory. Raises :class:`InfeasibleError` if there
        are no placements."""
        free = replace(self._inside(self.request, 0), repeats=repeats, memory_limit=UNLIMITED, host_limit=math.inf)
        solution = solve_only(free, few, self.timings)
        windows = windows_of(whole, free.cluster, repeats)
        return solution.unlimited * _unfolded(solution, stacks, windows) / self.layout.stages

    def _is_rehearsed(self, graph: Graph, repeats: Repeats) -> bool:
        """Whether what a pipeline holds is measured, so that the program's limit is of what it counts."""
        return is_soon_rehearsed(self.layout, graph, repeats.microbatches)

    def _asks_only_quickest(self, graph: Graph, repeats: Repeats) -> bool:
        is_average = repeats.in_flight < min(repeats.microbatches, repeats.stages)
        return is_average and len(graph) > MOST_NODES and not self.request.cluster.groups

    @property
    def _worth(self) -> float:
        """Seconds of the program for all stages together with which one of them probably takes too long."""
        if not (self._is_first and self._is_alike):
            return math.inf
        return SAFETY_FACTOR * self.request.worth * self.layout.stages

    def _solved(self, request: PlanRequest, graph: Graph) -> MeshSolution:
        try:
            return solve_only(request, graph, self.timings)
        except TooSlowError as error:
            share = error.seconds / self.layout.stages / SAFETY_FACTOR
            if math.isfinite(self.best):
                share = max(share, SAFETY_FACTOR * self.best)  # From there on it is given up.
            raise TooSlowError(self.layout.described, share, is_proven=False, is_least=True) from None

    def _in_divisions(self, inside: PlanRequest, limited: PlanRequest, graph: Graph) -> list[MeshSolution]:
        """The solutions in every division of the rows that is worth trying. Raises :class:`InfeasibleError` if there
        is none."""
        tried = self._divisions(inside, limited.repeats)
        found, failures = self._divided(limited, graph, tried)
        short = [failure for failure in failures if isinstance(failure, ShortOfMemoryError)]
        if short:  # Of the others nothing would be proven.
            raise short[0]
        quickest = min(found, key=lambda solution: solution.breakdown.seconds, default=None)
        differ = bool(limited.cluster.groups) and not self.layout.is_unequal
        if differ and (_is_any_full(failures) if quickest is None else is_short_of_memory(limited, quickest)):
            rows = max(1, inside.batch // limited.repeats.microbatches)
            for ordered in divisions_by_memory(inside, rows, tried):
                solve = partial(self._in_division, limited, graph)
                found += bisected(ordered, solve, lambda solution: solution.saves_memory)
        if not found and failures:
            raise failures[0]
        return found

    def _divided(
        self, limited: PlanRequest, graph: Graph, tried: Sequence[Division]
    ) -> tuple[list[MeshSolution], list[InfeasibleError]]:
        """The solutions in each of some divisions, and why others have none."""
        found, failures = list[MeshSolution](), list[InfeasibleError]()
        for division in tried:
            try:
                found.append(self._solved(on_mesh(limited, division), graph))
            except InfeasibleError as error:
                failures.append(error)
        return found, failures

    def _in_division(self, limited: PlanRequest, graph: Graph, division: Division) -> MeshSolution | None:
        """The solution in one division; None: nothing fits. Raises :class:`TooSlowError`."""
        found, failures = self._divided(limited, graph, [division])
        for failure in failures:
            if isinstance(failure, TooSlowError):
                raise failure
        return found[0] if found else None

    def _inside(self, request: PlanRequest, kind: int) -> PlanRequest:
        """The request for the devices of one stage, if its mesh is its own."""
        if not self.layout.is_unequal:
            return request
        block = self.layout.blocks[kind]
        return replace(request, mesh=(len(block),), cluster=request.cluster.at(block.start, len(block)))

    def _divisions(self, inside: PlanRequest, repeats: Repeats) -> tuple[Division, ...]:
        """The meshes to try, with the shares of rows. Of stages with meshes of their own all have as many axes."""
        if not self.layout.is_unequal:
            return divisions(inside, max(1, inside.batch // repeats.microbatches))
        axes = max(len(mesh) for size in self.layout.counts for mesh in mesh_candidates(replace(inside, mesh=(size,))))
        return tuple(((1,) * (axes - len(mesh)) + mesh, ()) for mesh in mesh_candidates(inside))

    def _share(self, solutions: Sequence[MeshSolution]) -> float:
        """The seconds that the slowest stage takes at least, whichever of ``solutions`` the stages have. Where stages
        differ, nothing is known: each operation may lie where it takes least."""
        return min(solution.unlimited for solution in solutions) / self.layout.stages if self._is_alike else 0.0

    @property
    def _is_alike(self) -> bool:
        """Whether all stages have as many devices of the same kind."""
        return len(set(kinds_of_blocks(self.request.cluster, self.layout.blocks))) == 1


def _is_any_full(failures: Sequence[InfeasibleError]) -> bool:
    """Whether memory is what any of these lack."""
    return any(not isinstance(failure, TooSlowError) for failure in failures)


def _unfolded(solution: MeshSolution, stacks: Sequence[Stack], windows: Sequence[OverlapWindow]) -> float:
    """How many times as long as in ``solution`` a step takes that has all layers of ``stacks``: those that are left out
    take what the last turn before them takes. ``windows``: in which messages of all layers overlap computation. Few
    layers hide fewer: of what they reduce, the last bucket is more."""
    graph, lines, turns = solution.step.placed.graph, solution.breakdown.lines, list(map(FewLayers().repeated, stacks))

    def times(name: str) -> int:
        numbers = [number_in(graph[name], stack.path) if name in graph else None for stack in stacks]
        return 1 + sum(count for number, (turn, count) in zip(numbers, turns, strict=True) if number in turn)

    every = [line.of_several(times(line.name)) for line in lines if line.kind != "hidden"]
    hidden = hidden_lines(every, windows, lambda line: line.phase)
    return sum(line.seconds for line in (*every, *hidden)) / solution.breakdown.seconds
