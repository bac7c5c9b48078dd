"""The cost of each choice of a class: its seconds in a step, and its bytes on a device and in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.cost import usable_nvme_bytes
from autopar.ir.assignment import Offloaded, ParameterPlacement, Recomputed, WeightInHost
from autopar.ir.microbatching import ONCE
from autopar.ir.node import SAVED_ACTIVATION, Node, TensorType, Value
from autopar.ir.placements import Placements, Strategy
from autopar.offload import NVME_BUFFERS
from autopar.optimizers import optimizer_bytes
from autopar.passes.recompute.recomputable import live_shares
from autopar.solver.problem import Group, Transfer

from .choices import OUTPUTS, Choice, ChoiceSets
from .item_prices import (
    accumulator_bytes,
    adding_seconds,
    agreement_seconds,
    offload_seconds,
    offloaded_bytes,
    optimizer_seconds,
    parameter_bytes,
    partial_bytes,
    piece_bytes,
    swap_seconds,
    temporary_bytes,
    weight_bytes,
    weight_swap_seconds,
    working_copy_seconds,
)
from .placed_step import phases_of
from .prices import BUCKET_BYTES, local_bytes


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
        host = np.array([self._host_bytes(node, choice) for choice in choices], dtype=np.float64)
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
        prices, raw = self.choice_sets.prices, self._accumulator_bytes(node, choice) + self.waiting_bytes(node, choice)
        if node.is_placeholder or node.op == SAVED_ACTIVATION:
            held = prices.held(node.type, choice.outputs[0])
            if isinstance(choice, Offloaded):
                seconds = swap_seconds(prices, node, choice, self.choice_sets.repeats)
                return seconds, self._live_shares[node.name] * held + raw, 0.0
            return 0.0, self._copies_held(node, choice) * held + raw, 0.0
        seconds = self._run_seconds(node, choice)
        kinds = tuple(self.choice_sets.graph.type_of(value) for value in node.operands)
        seconds += adding_seconds(prices, node, kinds, choice, self.gradients, self.choice_sets.repeats)
        return seconds, raw, float(temporary_bytes(prices, node, kinds, choice))

    def _parameter_charges(self, node: Node, place: ParameterPlacement) -> tuple[float, float, float]:
        prices, optimizer = self.choice_sets.prices, self.choice_sets.optimizer
        weight, gradient, state = parameter_bytes(prices, node, place, optimizer)
        seconds = working_copy_seconds(prices, node, place)
        fetched = 0
        if isinstance(place, WeightInHost):
            repeats, phases = self.choice_sets.repeats, phases_of(self.choice_sets.graph)
            seconds += weight_swap_seconds(prices, node, place, repeats, phases)
            weight, fetched = 0, local_bytes(node.type, place.weight, prices.mesh)
        if node.target not in self.choice_sets.trained:
            return seconds, float(weight), float(fetched)
        seconds += optimizer_seconds(prices, node, place, optimizer)
        seconds += offload_seconds(prices, node, place, optimizer)
        if place.weight != place.optimizer:
            seconds += prices.table(node.type, sent="bucketed").cost(place.optimizer, place.weight)
        visiting = piece_bytes(prices, node, place, optimizer)
        if place.offload == "nvme" and not prices.cluster.device.has_host:
            visiting *= NVME_BUFFERS
        if place.offload == "nvme" and not self._fits_on_disk(node, place):
            seconds = math.inf
        return seconds, float(weight + gradient + state), float(max(visiting, fetched))

    def _fits_on_disk(self, node: Node, place: ParameterPlacement) -> bool:
        """Whether the disk has room for this share of every parameter's state. The disk is far larger than memory, so
        its limit is kept parameter by parameter instead of by a row of the program."""
        whole = optimizer_bytes(self.choice_sets.optimizer, node.stored)
        share = offloaded_bytes(self.choice_sets.prices, node, place, self.choice_sets.optimizer) / int(whole)
        return share * self._all_states <= usable_nvme_bytes(self.choice_sets.prices.cluster)

    @cached_property
    def _all_states(self) -> int:
        """Bytes of the optimizer state of all parameters together."""
        choice_sets = self.choice_sets
        trained = (node for node in choice_sets.graph.placeholders("param") if node.target in choice_sets.trained)
        return sum(
            int(optimizer_bytes(choice_sets.optimizer, node.stored)) * choice_sets.count_of(node.name)
            for node in trained
        )

    @cached_property
    def _live_shares(self) -> Mapping[str, float]:
        return live_shares(self.choice_sets.graph)

    def _host_bytes(self, node: Node, choice: Choice) -> int:
        """Bytes in host memory. While state is on the device for the update, it counts as temporary."""
        choice_sets = self.choice_sets
        if isinstance(choice, Offloaded):
            held = local_bytes(node.type, choice.outputs[0], choice_sets.prices.mesh)
            return held * choice_sets.repeats.in_flight
        if not isinstance(choice, ParameterPlacement):
            return 0
        weight = weight_bytes(choice_sets.prices, node, choice) if isinstance(choice, WeightInHost) else 0
        has_state = choice.offload == "host" and node.target in choice_sets.trained
        state = offloaded_bytes(choice_sets.prices, node, choice, choice_sets.optimizer) if has_state else 0
        return weight + state

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
        repeats = self.choice_sets.repeats
        return repeats.in_flight if node.op == SAVED_ACTIVATION else repeats.copies_of(node.op)

    def waiting_bytes(self, node: Node, choice: Strategy) -> float:
        """Bytes of the gradients that ``node`` computes as partial sums and that wait in a bucket for others, in a step
        of one pass, twice: as they are, and in its message. Of models that fill several buckets, their part of one."""
        if self.choice_sets.repeats != ONCE:
            return 0.0
        kinds = self._gradients_of(node, choice)
        waiting = sum(partial_bytes(self.choice_sets.prices, kind, raw) for kind, raw in kinds)
        return 2.0 * self._share_of_bucket * waiting

    @cached_property
    def _share_of_bucket(self) -> float:
        """A bucket as a share of all gradients."""
        graph, count = self.choice_sets.graph, self.choice_sets.count_of
        total = sum(int(graph.type_of(value).bytes) * count(value.node) for value in self.gradients)
        return min(1.0, BUCKET_BYTES / max(total, 1))

    def _accumulator_bytes(self, node: Node, choice: Strategy) -> int:
        """Bytes of the accumulators for gradients that the node computes as partial sums."""
        prices, repeats = self.choice_sets.prices, self.choice_sets.repeats
        return sum(accumulator_bytes(prices, kind, raw, repeats) for kind, raw in self._gradients_of(node, choice))

    def _gradients_of(self, node: Node, choice: Strategy) -> Iterator[tuple[TensorType, Placements]]:
        """The gradients of parameters among the results of ``node``, as it computes them."""
        for i, place in enumerate(choice.outputs):
            if (value := Value(node.name, i)) in self.gradients:
                yield self.choice_sets.graph.type_of(value), place
