"""Mixes two solutions of a program whose equal layers choose alike: some layers choose as in a quick one that does not
fit, the others as in one that fits.

Where a few bytes are lacking, all equal layers save memory at once in the tied program, though it would do if some did.
Every mix is a step of its own, of which the first or the last layers are quick: besides their own costs it pays
for the reshards between both parts, at one place of forward and of backward. Its memory grows with the number of quick
layers, mostly in proportion, so that the greatest number that fits is soon found by measuring few.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE
from autopar.ir.module_paths import block_of
from autopar.solver.problem import Ints, evaluate, host_of, memory_of

from .formulate import part_layers
from .memory_limit import without_limit
from .mesh_solution import MeshSolution, peak_bytes
from .peaks import LEAST_NODES, Peaks
from .request import PlanRequest

Point = tuple[float, float, Ints]
# How many numbers of quick layers are measured.
# Chosen: the second mostly corrects the first by one layer.
TRIES = 3
# The share of the gap by which large steps must become quicker, by what their memory is worth, for each try. Chosen: a
# try takes 5 s of GPT-3's 35, and the first made its step 0.4% quicker.
WORTH_A_TRY = 0.2


def mix_layers(
    request: PlanRequest, annotated: Graph, best: MeshSolution, known: Iterable[Ints], peaks: Peaks
) -> MeshSolution:
    """The quickest found of ``best``, which fits, and of its mixes with one of ``known``, choices of its program that
    may not fit. Of large steps, which take long to measure, only the last layers are tried, and only if a step runs
    once: its backward begins with them, where most is held, and those that save no memory need none to compute values
    again."""
    is_large = len(annotated) >= LEAST_NODES
    is_tried = _ties_layers(best) and (request.repeats == ONCE or not is_large)
    quick = _quick(request, best, known, peaks) if is_tried else None
    if quick is None:
        return best
    mixing = _Mixing(request, annotated, best, quick, peaks, layer_positions(annotated))
    if is_large:
        found = dict(mixing.more_and_more(mixing.last, WORTH_A_TRY))
    else:
        found = dict(mixing.more_and_more(mixing.first))
        count = max(found, default=0)
        other = mixing.mixed(mixing.last(count)) if count else None
        if other is not None and other.solution.objective < found[count].solution.objective:
            found[-1] = other if peak_bytes(other) <= peaks.allowed else best
    return min((best, *found.values()), key=lambda solved: solved.solution.objective)


def _ties_layers(solved: MeshSolution) -> bool:
    classes = solved.instance.graph.classes
    return len(set(classes.values())) < len(classes)


def _quick(request: PlanRequest, best: MeshSolution, known: Iterable[Ints], peaks: Peaks) -> MeshSolution | None:
    """That of ``known`` which is quicker than ``best`` by the most for each byte that it holds more; None if none is
    quicker by more than the gap."""
    problem, slow = best.instance.problem, best.solution.objective
    points = [(memory_of(problem, choices), evaluate(problem, choices), choices) for choices in known]
    least = (1.0 - request.options.gap) * slow
    beyond = [point for point in points if point[1] < least]
    rates: list[tuple[float, MeshSolution]] = []
    for _, seconds, choices in _lower_hull(beyond):
        own = replace(best.solution, choices=choices, objective=seconds, bound=-math.inf, status="feasible")
        solved = MeshSolution.of(without_limit(best.instance), own)
        more = peaks.about(solved) - peaks.exact(best)
        if more > 0:
            rates.append(((slow - seconds) / more, solved))
    return max(rates, key=lambda pair: pair[0], default=(0.0, None))[1]


def _lower_hull(points: Iterable[Point]) -> list[Point]:
    """The points (bytes, seconds, choices) that no other, and no two others in proportion, are below in both.

    >>> import numpy as np
    >>> none = np.array([], dtype=np.int64)
    >>> [point[:2] for point in _lower_hull([(0, 9, none), (1, 8, none), (2, 1, none), (3, 2, none)])]
    [(0, 9), (2, 1)]
    """
    hull: list[Point] = []
    for held, seconds, choices in sorted(points, key=lambda point: point[:2]):
        if hull and seconds >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (held, seconds, choices)):
            hull.pop()
        hull.append((held, seconds, choices))
    return hull


def _is_above(before: Point, point: Point, after: Point) -> bool:
    """Whether a point is on or above the line between two others."""
    slope = (after[1] - before[1]) / (after[0] - before[0])
    return point[1] >= before[1] + slope * (point[0] - before[0])


def layer_positions(graph: Graph) -> dict[str, int]:
    """The position of each node that is in a numbered element of a container, among the depths of all: 0 is the first.
    The depth is that among the numbers of the same container. Nodes elsewhere, and in the only one, have none."""
    blocks = {node.name: block for node in graph.nodes if (block := block_of(node.path))}
    numbers: dict[str, dict[int, str]] = defaultdict(dict)
    for block in dict.fromkeys(blocks.values()):
        stem, _, number = block.rpartition(".")
        numbers[stem][int(number)] = block
    depths = {
        own[number]: (2 * index + 1) / len(own)
        for own in numbers.values()
        if len(own) > 1
        for index, number in enumerate(sorted(own))
    }
    positions = {depth: position for position, depth in enumerate(sorted(set(depths.values())))}
    return {name: positions[depths[block]] for name, block in blocks.items() if block in depths}


@dataclass(frozen=True)
class _Mixing:
    """What is mixed: ``best``, which fits, and ``quick``, which needs more. ``positions``: those of nodes in layers."""

    request: PlanRequest
    annotated: Graph
    best: MeshSolution
    quick: MeshSolution
    peaks: Peaks
    positions: Mapping[str, int]

    @property
    def layers(self) -> int:
        return len(set(self.positions.values()))

    def first(self, count: int) -> frozenset[str]:
        """The nodes of so many of the first layers."""
        return frozenset(name for name, position in self.positions.items() if position < count)

    def last(self, count: int) -> frozenset[str]:
        """The nodes of so many of the last layers."""
        return frozenset(name for name, position in self.positions.items() if position >= self.layers - count)

    def mixed(self, parted: frozenset[str]) -> MeshSolution | None:
        """The step whose nodes ``parted`` are those of ``quick``; None if there is none."""
        return mix(self.request, self.annotated, self.best, self.quick, parted)

    def more_and_more(
        self, some: Callable[[int], frozenset[str]], worth: float = 0.0
    ) -> Iterator[tuple[int, MeshSolution]]:
        """Mixes that fit, of which more and more layers, the nodes ``some``, are quick, and their number. ``worth``:
        the share of the gap by which those that may still become quick must shorten the step."""
        low, high, allowed = 0, self.layers, self.peaks.allowed
        held, needed = float(self.peaks.exact(self.best)), float(self.peaks.about(self.quick))
        slow = self.best.solution.objective
        least = worth * self.request.options.gap * slow * self.layers / (slow - self.quick.solution.objective)
        for _ in range(TRIES):
            more = (high - low) * (allowed - held) / (needed - held) if needed > held else 0.0
            if high - low <= 1 or more < max(0.5, least):
                return
            count = min(max(low + int(more), low + 1), high - 1)
            mixed = self.mixed(some(count))
            if mixed is None:
                return
            peak = peak_bytes(mixed)
            if peak <= allowed:
                yield count, mixed
                low, held = count, peak
            else:
                high, needed = count, peak


def mix(
    request: PlanRequest, annotated: Graph, best: MeshSolution, quick: MeshSolution, parted: frozenset[str]
) -> MeshSolution | None:
    """The step whose nodes ``parted`` choose as in ``quick`` and all others as in ``best``; None if there is none."""
    instance = without_limit(part_layers(request, annotated, best.instance, parted))
    try:
        choices = instance.chosen(_spliced(best.assignment, quick.assignment, parted))
    except ValueError:  # What options restrict by what equal layers do together, parts of them may not do.
        return None
    seconds = evaluate(instance.problem, choices)
    if not math.isfinite(seconds) or host_of(instance.problem, choices) > instance.problem.host_limit:
        return None
    own = replace(best.solution, choices=choices, objective=seconds, bound=-math.inf, status="feasible")
    return MeshSolution.of(instance, own)


def _spliced(best: Assignment, quick: Assignment, parted: frozenset[str]) -> Assignment:
    """The assignment that is ``quick`` for the nodes ``parted`` and ``best`` for all others."""
    return replace(
        best,
        strategies={name: (quick if name in parted else best).strategies[name] for name in best.strategies},
        parameters={name: (quick if name in parted else best).parameters[name] for name in best.parameters},
        recomputed=(best.recomputed - parted) | (quick.recomputed & parted),
        offloaded=(best.offloaded - parted) | (quick.offloaded & parted),
    )
