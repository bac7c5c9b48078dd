"""Prices of moving values from the placements that classes produce to the placements that other classes need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from autopar.ir.assignment import Recomputed, overlaps_backward
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, TensorType, Value
from autopar.ir.placements import Placements
from autopar.ir.reshard import Sent
from autopar.solver.problem import Floats, Ints, Transfer

from .choices import OUTPUTS, Choice, ChoiceSets, operand_place, result_place
from .edges import TensorEdge
from .full_precision_reduction import forbid_reductions, full_precision_gradients
from .fused_kernels import FusedKernels
from .prices import Prices
from .reshard_table import ReshardTable

# None among sources: the value is not available. None among targets: it is not needed.
_Places = Sequence[Placements | None]


def consumers_inside(edge: TensorEdge, fused: FusedKernels | None) -> tuple[tuple[str, int], ...]:
    """The consumers of an edge that are in the kernel of its producer."""
    if fused is None or edge.role == "gradient":
        return ()
    value = Value(edge.producer, edge.result)
    return tuple(c for c in edge.consumers if c[1] >= 0 and c[0] != OUTPUTS and fused.is_inside(value, (c[0],)))


def how_sent(graph: Graph, edge: TensorEdge) -> Sent:
    """How the value of an edge is sent: gradients in buckets, weights with others that the phase gathers."""
    if edge.role == "gradient":
        return "bucketed"
    if graph[edge.producer].op != "param":
        return "alone"
    return "forward" if edge.role == "forward" else "backward"


def breaks_kernel(edge: TensorEdge, fused: FusedKernels | None) -> bool:
    """Whether reshards of an edge are inside of a kernel, which is part of their price."""
    return bool(edge.consumers) and consumers_inside(edge, fused) == edge.consumers


@dataclass(frozen=True, eq=False)
class Transfers:
    """The prices of the tensor edges of ``choice_sets``."""

    choice_sets: ChoiceSets

    @cached_property
    def full_precision(self) -> frozenset[Value]:
        """The values that may not be summed across devices before they are widened."""
        return full_precision_gradients(self.choice_sets.graph)

    @cached_property
    def only_backward(self) -> frozenset[str]:
        """The saved activations that nothing in forward reads."""
        choice_sets = self.choice_sets
        read = {v.node for n in choice_sets.graph.nodes if n.phase == "forward" for v in n.operands}
        read |= {value.node for value in choice_sets.results if value is not None}
        classes = {choice_sets.class_of(name) for name in read}
        return frozenset(
            n for n in choice_sets.counts if choice_sets.graph[n].op == SAVED_ACTIVATION and n not in classes
        )

    def of(self, edge: TensorEdge, count: int) -> Transfer:
        """The transfer of an edge that occurs ``count`` times."""
        breaks = breaks_kernel(edge, self.choice_sets.prices.fused)
        return self._transfer(edge, lambda sources, targets: self._cost(edge, count, sources, targets, breaks))

    def broken(self, edges: Mapping[TensorEdge, int]) -> Iterator[Transfer]:
        """What reshards inside of kernels add, where only some of the consumers of an edge are in the kernel of the
        producer. Where all are, it is part of their transfer."""
        for edge, count in edges.items():
            inside = self._inside(edge)
            if inside and inside != edge.consumers:
                own = TensorEdge(edge.producer, edge.result, edge.role, inside)
                yield self._transfer(own, partial(self._breaking, own, count), " inside a kernel")

    def _inside(self, edge: TensorEdge) -> tuple[tuple[str, int], ...]:
        return consumers_inside(edge, self.choice_sets.prices.fused)

    def _breaking(self, edge: TensorEdge, count: int, sources: _Places, targets: _Places) -> Floats:
        """Seconds in a step that reshards inside a kernel add."""
        choice_sets = self.choice_sets
        kind = choice_sets.graph.type_of(Value(edge.producer, edge.result))
        times = count * choice_sets.repeats.microbatches
        return times * broken_matrix(choice_sets.prices, kind, sources, targets)

    def _transfer(self, edge: TensorEdge, cost: Callable[[_Places, _Places], Floats], kind: str = "") -> Transfer:
        choice_sets, name = self.choice_sets, f"{edge.producer}.{edge.result} {edge.role}{kind}"
        rows = [self._row(edge, choice) for choice in choice_sets.choices[edge.producer]]
        needs = [
            [self._column(consumer, operand, edge.role, choice) for choice in choice_sets.choices[consumer]]
            for consumer, operand in edge.consumers
        ]
        sources, targets = list(dict.fromkeys(rows)), list(dict.fromkeys(place for need in needs for place in need))
        consumers = tuple(choice_sets.index[consumer] for consumer, _ in edge.consumers)
        columns = tuple(_positions(need, targets) for need in needs)
        matrix = cost(sources, targets)
        return Transfer(name, choice_sets.index[edge.producer], _positions(rows, sources), consumers, columns, matrix)

    def _cost(self, edge: TensorEdge, count: int, sources: _Places, targets: _Places, breaks: bool) -> Floats:
        """Seconds from sources to targets in a step. Values are sent in every microbatch, gradients once a step. A
        reshard that ``breaks`` a kernel costs what that adds."""
        choice_sets, value = self.choice_sets, Value(edge.producer, edge.result)
        is_gradient = edge.role == "gradient"
        table = choice_sets.prices.table(choice_sets.graph.type_of(value), sent=how_sent(choice_sets.graph, edge))
        times = 1 if is_gradient else choice_sets.repeats.microbatches
        cost = count * times * _submatrix(table, sources, targets)
        if not is_gradient and overlaps_backward(choice_sets.graph, value):
            cost = np.where(np.isfinite(cost), 0.0, cost)
        cost = cost + self._breaking(edge, count, sources, targets) if breaks else cost
        return forbid_reductions(cost, sources, targets) if value in self.full_precision else cost

    def _row(self, edge: TensorEdge, choice: Choice) -> Placements | None:
        """The placement in which a value is produced; None if backward needs it and it is not available then."""
        node = self.choice_sets.graph[edge.producer]
        is_missing = (
            edge.role == "backward"
            and node.phase == "forward"
            and not node.is_placeholder
            and node.op != SAVED_ACTIVATION
        )
        return None if is_missing and not isinstance(choice, Recomputed) else result_place(choice, edge.result)

    def _column(self, consumer: str, operand: int, role: str, choice: Choice) -> Placements | None:
        """The placement in which a consumer needs a value. None if it does not need it: in backward, because it runs
        only in forward; in forward, because it is a saved activation that only backward reads and that is
        recomputed."""
        forward = consumer != OUTPUTS and self.choice_sets.graph[consumer].phase == "forward"
        recomputed_later = (
            role == "forward" and forward and isinstance(choice, Recomputed) and consumer in self.only_backward
        )
        only_forward = role == "backward" and forward and not isinstance(choice, Recomputed)
        return None if recomputed_later or only_forward else operand_place(choice, operand)


def _positions(places: _Places, among: _Places) -> Ints:
    index = {place: i for i, place in enumerate(among)}
    return np.array([index[place] for place in places], dtype=np.int64)


def broken_matrix(prices: Prices, kind: TensorType, sources: _Places, targets: _Places) -> Floats:
    """What :meth:`.Prices.broken` says of every source and target that are there and differ, otherwise 0."""
    seconds = np.zeros((len(sources), len(targets)))
    for seat in prices.seats:
        first, second = (
            np.array([0 if place is None else int(seat.holds(kind, place, prices.mesh).bytes) for place in places])
            for places in (sources, targets)
        )
        seconds = np.maximum(seconds, (first[:, None] + second) / seat.cluster.device.memory_bandwidth)
    seconds += prices.cluster.device.launch_seconds
    seconds[[place is None for place in sources]] = 0.0
    seconds[:, [place is None for place in targets]] = 0.0
    rows = {place: p for p, place in enumerate(sources)}
    for q, place in enumerate(targets):
        if place in rows:
            seconds[rows[place], q] = 0.0
    return seconds


def _submatrix(table: ReshardTable, rows: _Places, columns: _Places) -> Floats:
    """Seconds from rows to columns: 0 for a column that needs nothing, otherwise infinite for an unavailable row."""
    seconds = np.full((len(rows), len(columns)), np.inf)
    seconds[:, [column is None for column in columns]] = 0.0
    available, needed = ([i for i, place in enumerate(places) if place is not None] for places in (rows, columns))
    starts, ends = ([table.index[place] for place in places if place is not None] for places in (rows, columns))
    seconds[np.ix_(available, needed)] = table.seconds[np.ix_(starts, ends)]
    return seconds
