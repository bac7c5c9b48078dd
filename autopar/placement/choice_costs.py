"""The cost of each choice of a class: its seconds in a step, and its bytes on a device and in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.ir.assignment import ParameterPlacement, Recomputed
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.ir.placements import Strategy
from autopar.solver.problem import Group, Transfer

from .choices import OUTPUTS, Choice, ChoiceSets
from .item_prices import (
    accumulator_bytes,
    adding_seconds,
    agreement_seconds,
    casting_seconds,
    offload_seconds,
    offloaded_bytes,
    optimizer_seconds,
    parameter_bytes,
    temporary_bytes,
)
from .prices import local_bytes


@dataclass(frozen=True, eq=False)
class ChoiceCosts:
    """The prices of the choices in ``choice_sets``."""

    choice_sets: ChoiceSets

    @cached_property
    def gradients(self) -> frozenset[Value]:
        """The gradients of parameters, as backward computes them."""
        return frozenset(self.choice_sets.graph.gradients.values())

    def group(self, name: str) -> Group:
        """The charges of a class: those of one node times the number of its nodes. Temporary bytes are not
        multiplied."""
        choice_sets = self.choice_sets
        if name == OUTPUTS:
            seconds = np.array([agreement_seconds(choice_sets.prices, (choice_sets.graph,))])
            return Group(name, seconds, np.zeros(1), np.zeros(1), np.zeros(1))
        count, node, choices = choice_sets.counts[name], choice_sets.graph[name], choice_sets.choices[name]
        rows = np.array([self._charges(node, choice) for choice in choices], dtype=np.float64)
        host = np.array([self._offloaded_bytes(node, choice) for choice in choices], dtype=np.float64)
        return Group(name, rows[:, 0] * count, rows[:, 1] * count, rows[:, 2], host * count)

    def rerun(self, name: str) -> Transfer:
        """The price of recomputation, separate from that of the first run: messages are assumed not to overlap it."""
        choice_sets = self.choice_sets
        cost = [[self._recompute_seconds(name, choice)] for choice in choice_sets.choices[name]]
        rows, end = np.arange(len(cost)), np.zeros(1, dtype=np.int64)
        return Transfer(
            name=f"{name} again",
            producer=choice_sets.index[name],
            source=rows,
            consumers=(choice_sets.index[OUTPUTS],),
            targets=(end,),
            cost=np.array(cost),
        )

    def _charges(self, node: Node, choice: Choice) -> tuple[float, float, float]:
        """Seconds, resting bytes and temporary bytes of one node."""
        if isinstance(choice, ParameterPlacement):
            return self._parameter_charges(node, choice)
        prices, raw = self.choice_sets.prices, float(self._accumulator_bytes(node, choice))
        if node.is_placeholder or node.op == SAVED_ACTIVATION:
            held = local_bytes(node.type, choice.outputs[0], prices.mesh)
            return 0.0, self._copies_held(node, choice) * held + raw, 0.0
        seconds = self._run_seconds(node, choice)
        seconds += adding_seconds(prices, node, choice, self.gradients, self.choice_sets.repeats)
        kinds = tuple(self.choice_sets.graph.type_of(value) for value in node.operands)
        return seconds, raw, float(temporary_bytes(prices, node, kinds, choice))

    def _parameter_charges(self, node: Node, place: ParameterPlacement) -> tuple[float, float, float]:
        prices, optimizer = self.choice_sets.prices, self.choice_sets.optimizer
        parts = parameter_bytes(prices, node, place, optimizer)
        casting = casting_seconds(prices, node, place)
        if node.target not in self.choice_sets.trained:
            return casting, float(parts[0]), 0.0
        seconds = casting + optimizer_seconds(prices, node, place, optimizer)
        seconds += offload_seconds(prices, node, place, optimizer)
        if place.weight != place.optimizer:
            seconds += prices.table(node.type, bucketed=True).cost(place.optimizer, place.weight)
        return seconds, float(sum(parts)), float(self._offloaded_bytes(node, place))

    def _offloaded_bytes(self, node: Node, choice: Choice) -> int:
        """Bytes in host memory. While they are on the device for the update, they count as temporary."""
        if not isinstance(choice, ParameterPlacement) or node.target not in self.choice_sets.trained:
            return 0
        return offloaded_bytes(self.choice_sets.prices, node, choice, self.choice_sets.optimizer)

    def _run_seconds(self, node: Node, choice: Strategy) -> float:
        """Seconds of one node in all microbatches."""
        kinds = tuple(self.choice_sets.graph.type_of(value) for value in node.operands)
        return self.choice_sets.prices.node(node, kinds, choice) * self.choice_sets.repeats.microbatches

    def _recompute_seconds(self, name: str, choice: Choice) -> float:
        node = self.choice_sets.graph[name]
        if not isinstance(choice, Recomputed) or node.op == SAVED_ACTIVATION:
            return 0.0
        return self._run_seconds(node, choice) * self.choice_sets.counts[name]

    def _copies_held(self, node: Node, choice: Strategy) -> float:
        """The number of copies of a value that the device holds at once."""
        if isinstance(choice, Recomputed) and self.choice_sets.recomputable is not None:
            return self.choice_sets.recomputable.shares[node.name]
        return self.choice_sets.repeats.in_flight if node.op == SAVED_ACTIVATION else 1

    def _accumulator_bytes(self, node: Node, choice: Strategy) -> int:
        """Bytes of the accumulators for gradients that the node computes as partial sums."""
        results = ((Value(node.name, i), place) for i, place in enumerate(choice.outputs))
        return sum(
            accumulator_bytes(
                self.choice_sets.prices, self.choice_sets.graph.type_of(value), place, self.choice_sets.repeats
            )
            for value, place in results
            if value in self.gradients
        )
