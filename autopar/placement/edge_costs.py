"""What it takes to bring values from how classes leave them to how others need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.ir.assignment import Recomputed, overlaps_backward
from autopar.ir.node import SAVED_ACTIVATION, Value
from autopar.ir.placements import Placements
from autopar.solver.problem import Floats, Ints, Transfer

from .choices import OUTPUTS, Choice, ChoiceSets, operand_place, result_place
from .edges import TensorEdge
from .full_precision_reduction import forbid_reductions, full_precision_gradients
from .prices import ReshardTable

# None: at its source, a value is not there; at its end, it is not needed.
_Places = Sequence[Placements | None]


@dataclass(frozen=True, eq=False)
class Transfers:
    """The prices of the routes of ``choice_sets``."""

    choice_sets: ChoiceSets

    @cached_property
    def late(self) -> frozenset[Value]:
        """What may not be added up across devices before it is widened."""
        return full_precision_gradients(self.choice_sets.graph)

    @cached_property
    def only_backward(self) -> frozenset[str]:
        """The rests that nothing in forward reads."""
        choice_sets = self.choice_sets
        read = {v.node for n in choice_sets.graph.nodes if n.phase == "forward" for v in n.operands}
        read |= {value.node for value in choice_sets.results if value is not None}
        classes = {choice_sets.class_of(name) for name in read}
        return frozenset(
            n for n in choice_sets.counts if choice_sets.graph[n].op == SAVED_ACTIVATION and n not in classes
        )

    def of(self, edge: TensorEdge, count: int) -> Transfer:
        """The transfer of a route that there is ``count`` times."""
        choice_sets, name = self.choice_sets, f"{edge.producer}.{edge.result} {edge.role}"
        rows = [self._row(edge, choice) for choice in choice_sets.choices[edge.producer]]
        needs = [
            [self._column(consumer, operand, edge.role, choice) for choice in choice_sets.choices[consumer]]
            for consumer, operand in edge.consumers
        ]
        sources, targets = list(dict.fromkeys(rows)), list(dict.fromkeys(place for need in needs for place in need))
        consumers = tuple(choice_sets.index[consumer] for consumer, _ in edge.consumers)
        columns = tuple(_positions(need, targets) for need in needs)
        cost = self._cost(edge, count, sources, targets)
        return Transfer(name, choice_sets.index[edge.producer], _positions(rows, sources), consumers, columns, cost)

    def _cost(self, edge: TensorEdge, count: int, sources: _Places, targets: _Places) -> Floats:
        """Seconds from sources to targets in a step. What a microbatch hands on is sent with each, gradients once."""
        choice_sets, value = self.choice_sets, Value(edge.producer, edge.result)
        is_gradient = edge.role == "gradient"
        table = choice_sets.prices.table(choice_sets.graph.type_of(value), bucketed=is_gradient)
        often = 1 if is_gradient else choice_sets.repeats.microbatches
        cost = count * often * _submatrix(table, sources, targets)
        if not is_gradient and overlaps_backward(choice_sets.graph, value):
            cost = np.where(np.isfinite(cost), 0.0, cost)
        return forbid_reductions(cost, sources, targets) if value in self.late else cost

    def _row(self, edge: TensorEdge, choice: Choice) -> Placements | None:
        """How a value lies at its source; None if backward asks for it and it is not there."""
        node = self.choice_sets.graph[edge.producer]
        gone = (
            edge.role == "backward"
            and node.phase == "forward"
            and not node.is_placeholder
            and node.op != SAVED_ACTIVATION
        )
        return None if gone and not isinstance(choice, Recomputed) else result_place(choice, edge.result)

    def _column(self, consumer: str, operand: int, role: str, choice: Choice) -> Placements | None:
        """How a consumer needs a value; None if it does not: in backward, because it ran in forward only, or in
        forward, because it is a rest for backward alone that is not kept."""
        forward = consumer != OUTPUTS and self.choice_sets.graph[consumer].phase == "forward"
        unneeded = role == "forward" and forward and isinstance(choice, Recomputed) and consumer in self.only_backward
        repeated = role == "backward" and forward and not isinstance(choice, Recomputed)
        return None if unneeded or repeated else operand_place(choice, operand)


def _positions(places: _Places, among: _Places) -> Ints:
    index = {place: i for i, place in enumerate(among)}
    return np.array([index[place] for place in places], dtype=np.int64)


def _submatrix(table: ReshardTable, rows: _Places, columns: _Places) -> Floats:
    """Seconds from rows to columns; to need nothing is free, what is not there cannot be had."""
    found = np.full((len(rows), len(columns)), np.inf)
    found[:, [column is None for column in columns]] = 0.0
    there, needed = ([i for i, place in enumerate(places) if place is not None] for places in (rows, columns))
    starts, ends = ([table.index[place] for place in places if place is not None] for places in (rows, columns))
    found[np.ix_(there, needed)] = table.seconds[np.ix_(starts, ends)]
    return found
