"""Transient memory of a section: the bytes that it needs in addition to those it saves for backward.

The kernels of a section run in order. A value is live from the kernel that writes it to the last one that reads it, and
a resharded copy of it from the first to the last kernel that reads that copy. Values saved for backward are counted
elsewhere, as if all were live throughout. So saved values that forward has not computed yet, and those that backward
has read for the last time, are subtracted here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.kernels.kernel import Kernel, readers
from autopar.ir.assignment import Assignment, Use, operand_uses
from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.placements import Placements
from autopar.placement.prices import local_bytes
from autopar.planner.roles.expert_blocks import OPERATIONS


@dataclass(frozen=True)
class Span:
    """Bytes that are live from the kernel at ``first`` to the one at ``last``."""

    first: int
    last: int
    nbytes: int

    def __post_init__(self) -> None:
        assert self.first <= self.last, "kernels must be in the order in which they run"


def most(spans: Iterable[Span], length: int) -> int:
    """The most bytes that are live at once while ``length`` kernels run.

    >>> most([Span(0, 1, 5), Span(1, 2, 3), Span(2, 2, 4)], 3)
    8
    """
    change = [0] * (length + 1)
    for span in spans:
        change[span.first] += span.nbytes
        change[span.last + 1] -= span.nbytes
    highest = now = 0
    for step in change:
        now += step
        highest = max(highest, now)
    return highest


@dataclass(frozen=True)
class Transients:
    """Computes the transient memory of sections. ``size``: bytes of a value on one device; ``kept``: bytes of each
    value that forward saves for backward; ``running``: all kernels in the order in which they run."""

    graph: Graph
    assignment: Assignment
    size: Callable[[Value], int]
    kept: Mapping[Value, int]
    running: Sequence[Kernel]

    @cached_property
    def place(self) -> Mapping[int, int]:
        return {id(kernel): at for at, kernel in enumerate(self.running)}

    @cached_property
    def gradients(self) -> frozenset[Value | None]:
        return frozenset(self.graph.gradients.values())

    @cached_property
    def last_read(self) -> Mapping[Value, int]:
        """The position among all kernels of the last backward kernel that reads each value."""
        return {v: at for at, kernel in enumerate(self.running) if kernel.phase == "backward" for v in kernel.reads}

    def working(self, forward: Sequence[Kernel], backward: Sequence[Kernel], kept: Collection[Value]) -> int:
        """The most bytes in addition to those of ``kept``, the values that the section saves for backward."""
        counted = sum(self.kept[value] for value in kept)
        return max(0, *(self._most(kernels, kept) - counted for kernels in (forward, backward)))

    def _most(self, kernels: Sequence[Kernel], kept: Collection[Value]) -> int:
        written = {value: at for at, kernel in enumerate(kernels) for value in kernel.writes}
        read = {value: at for at, kernel in enumerate(kernels) for value in kernel.reads}
        spans = [*self._written(kernels, written, read), *self._received(kernels, written, read), *self._moved(kernels)]
        spans += [span for value in kept if (span := self._saved(value, kernels, written, read)) is not None]
        return most(spans, len(kernels))

    def _written(self, kernels: Sequence[Kernel], written: dict[Value, int], read: dict[Value, int]) -> Iterator[Span]:
        """Values that are written and not saved. The gradient of a weight is added to the accumulated one at once."""
        names = {node.name for kernel in kernels for node in kernel.nodes}
        for value, at in written.items():
            if value in self.kept:
                continue
            phase = self.graph[value.node].phase
            leaves = any(user.phase == phase and user.name not in names for user in readers(self.graph, value))
            last = len(kernels) - 1 if leaves else read.get(value, at)
            # Blocks of experts are priced separately.
            if not (value in self.gradients and self.graph[value.node].op in OPERATIONS):
                yield Span(at, last, self.size(value))

    def _received(self, kernels: Sequence[Kernel], written: dict[Value, int], read: dict[Value, int]) -> Iterator[Span]:
        """Inputs from other sections in the same phase that are not saved."""
        phase = kernels[0].phase if kernels else None
        for value, last in read.items():
            node = self.graph[value.node]
            if value in written or value in self.kept:
                continue
            if not node.is_placeholder and node.phase == phase:
                yield Span(0, last, self.size(value))

    def _saved(
        self, value: Value, kernels: Sequence[Kernel], written: Mapping[Value, int], read: Mapping[Value, int]
    ) -> Span | None:
        """The span of a saved value: from its kernel to the end, and in backward until its last reader, which may be in
        a section that runs later; None if all readers ran in earlier sections."""
        end, nbytes = len(kernels) - 1, self.kept[value]
        if value in written:
            return Span(written[value], end, nbytes)
        if not kernels or self.last_read.get(value, -1) < self.place[id(kernels[0])]:
            return None
        is_read_later = self.last_read[value] > self.place[id(kernels[-1])]
        return Span(0, end if is_read_later else read.get(value, end), nbytes)

    def _moved(self, kernels: Sequence[Kernel]) -> Iterable[Span]:
        """Resharded copies of values, each for all kernels that read it."""
        spans: dict[tuple[Value, Placements], Span] = {}
        for at, use in self._resharded(kernels):
            nbytes, copy = local_bytes(use.kind, use.target, self.assignment.mesh), (use.value, use.target)
            spans[copy] = Span(spans[copy].first if copy in spans else at, at, nbytes)
        return spans.values()

    def _resharded(self, kernels: Sequence[Kernel]) -> Iterator[tuple[int, Use]]:
        """The operands that kernels read resharded, each with the position of the kernel."""
        for at, kernel in enumerate(kernels):
            for node in kernel.nodes:
                moved = (use for use in operand_uses(self.graph, self.assignment, node) if use.source != use.target)
                yield from ((at, use) for use in moved)
