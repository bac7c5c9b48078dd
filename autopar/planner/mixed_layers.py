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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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

# How many of what holds less than the best are measured. Chosen: each takes a rehearsal.
SLOWER = 2
# How many numbers of quick layers are measured.
# Chosen: the second mostly corrects the first by one layer.
TRIES = 3
# The share of the gap by which large steps must become quicker, by what their memory is worth, for each try. Chosen: a
# try takes 5 s of GPT-3's 35, and the first made its step 0.4% quicker.
WORTH_A_TRY = 0.2


class Point(NamedTuple):
    """What ``choices`` of a program count as bytes, and their seconds."""

    held: float
    seconds: float
    choices: Ints


def mix_layers(
    request: PlanRequest, annotated: Graph, best: MeshSolution, known: Iterable[Ints], peaks: Peaks
) -> MeshSolution:
    """The quickest found of ``best``, which fits, of ``known``, choices of its program that may not fit, and of mixes
    with a quicker one of these: of ``best``, and of one that holds so much less that more layers may be quick. Of large
    steps, which take long to measure, only mixes of ``best`` are tried, of which the last layers are quick, and only if
    a step runs once: its backward begins with them, where most is held, and those that save no memory need none to
    compute values again."""
    is_large = len(annotated) >= LEAST_NODES
    if not _ties_layers(best) or (is_large and request.repeats != ONCE):
        return best
    found, positions = [best], layer_positions(annotated)
    for slow, quick in _pairs(request, best, [*known], peaks):
        if not is_large and peaks.exact(quick) <= peaks.allowed:
            found.append(quick)
            continue
        mixing = _Mixing(request, annotated, slow, quick, peaks, positions)
        found += mixing.of_large() if is_large else mixing.of_small()
    return min(found, key=lambda solved: solved.solution.objective)


def _ties_layers(solved: MeshSolution) -> bool:
    classes = solved.instance.graph.classes
    return len(set(classes.values())) < len(classes)


def _pairs(
    request: PlanRequest, best: MeshSolution, known: Sequence[Ints], peaks: Peaks
) -> Iterator[tuple[MeshSolution, MeshSolution]]:
    """What to mix: ``best`` with the quicker one of which it gains most and, unless a step is large, another that holds
    less, if more is expected of that."""
    points = [Point(memory_of(best.instance.problem, own), evaluate(best.instance.problem, own), own) for own in known]
    least = (1.0 - request.options.gap) * best.solution.objective
    quicker = [_solved(best, point) for point in _lower_hull(point for point in points if point.seconds < least)]
    is_large = len(best.instance.graph) >= LEAST_NODES
    if is_large:  # What is estimated to hold less was ruled out before.
        quicker = [quick for quick in quicker if peaks.about(quick) > peaks.exact(best)]
    if not quicker:
        return
    expected, quick = min(((_expected(best, quick, peaks), quick) for quick in quicker), key=lambda pair: pair[0])
    if expected < best.solution.objective:
        yield best, quick
    if is_large:
        return
    slower = _lower_hull(point for point in points if math.isfinite(point.seconds) and point.seconds > least)
    below = [_solved(best, point) for point in slower if point.seconds > best.solution.objective]
    fitting = [solved for solved in below[-SLOWER:] if peaks.exact(solved) < peaks.exact(best)]
    pairs = [(_expected(slow, quick, peaks), slow, quick) for slow in fitting for quick in quicker]
    other = min(pairs, key=lambda pair: pair[0], default=None)
    if other is not None and other[0] < min(expected, least):
        yield other[1:]


def _solved(best: MeshSolution, point: Point) -> MeshSolution:
    """The solution of the program of ``best`` at a ``point``."""
    own = replace(best.solution, choices=point.choices, objective=point.seconds, bound=-math.inf, status="feasible")
    return MeshSolution.of(without_limit(best.instance), own)


def _expected(slow: MeshSolution, quick: MeshSolution, peaks: Peaks) -> float:
    """Seconds of the mix of two solutions that just fits, if seconds and bytes change in proportion. The ``slow`` one
    fits."""
    held, needed = peaks.exact(slow), peaks.about(quick)
    share = min((peaks.allowed - held) / (needed - held), 1.0) if needed > held else 1.0
    return slow.solution.objective - share * (slow.solution.objective - quick.solution.objective)


def _lower_hull(points: Iterable[Point]) -> list[Point]:
    """The points that no other, and no two others in proportion, are below in both bytes and seconds.

    >>> import numpy as np
    >>> none = np.array([], dtype=np.int64)
    >>> [own[:2] for own in _lower_hull(Point(*own, none) for own in [(0, 9), (1, 8), (2, 1), (3, 2)])]
    [(0, 9), (2, 1)]
    """
    hull: list[Point] = []
    for point in sorted(points, key=lambda point: point[:2]):
        if hull and point.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(before: Point, point: Point, after: Point) -> bool:
    """Whether a point is on or above the line between two others."""
    slope = (after.seconds - before.seconds) / (after.held - before.held)
    return point.seconds >= before.seconds + slope * (point.held - before.held)


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

    def of_large(self) -> list[MeshSolution]:
        return [mixed for _, mixed in self.more_and_more(self.last, WORTH_A_TRY)]

    def of_small(self) -> list[MeshSolution]:
        """Mixes of which the first layers are quick, and one of which as many of the last are."""
        found = dict(self.more_and_more(self.first))
        count = max(found, default=0)
        other = self.mixed(self.last(count)) if count else None
        if other is None or other.solution.objective >= found[count].solution.objective:
            return [*found.values()]
        return [*found.values(), *([other] if peak_bytes(other) <= self.peaks.allowed else [])]

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
