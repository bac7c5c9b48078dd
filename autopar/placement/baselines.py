"""Common layouts, priced for comparison with a plan: DDP, FSDP2, and Megatron's tensor parallelism.

Each is a restriction of the placement program, so it computes the same numbers and has the same prices:

- *data parallel* (DDP): every device has all weights, every operation that reads a weight runs on the device's own
  samples, and gradients are all-reduced in buckets.
- *FSDP* (FSDP2): the same, with weights, gradients and optimizer state sharded over all devices. Weights outside of
  blocks (elements of a list of modules) may be gathered once a step instead, as FSDP2 keeps those of the root.
- *tensor parallel t* (Megatron, Shoeybi et al. 2019, section 3): matrices and tables are sharded over the innermost
  axis, samples over the other axes.

Where the samples do not divide among the devices, nobody's data parallelism is possible: what is priced then divides
sequences, or nothing, and is called by where weights are (*replicated weights*, *sharded weights*).

A rank may read any slice of the batch, so an input may also be replicated if that saves an exchange. Then every rank
knows the number of labels that count. Under DDP no rank does, and DDP averages the ranks' means instead. Statistics of
batch norm are those of the whole batch, as under SyncBatchNorm.

All are priced as plans, so that a plan can be any of them. FSDP2 gathers the weights of a block in one all-gather and
copies them out of it, where a plan gathers small weights in messages (:mod:`autopar.ir.weight_messages`) and large ones
singly, without copies. A joint gather saves what a message takes to begin, of which copying costs a twentieth for each
MiB: with weights of a few MiB, FSDP2 is quicker than its row says (docs/architecture.md has an example).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import Shard

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.module_paths import block_of
from autopar.ir.node import Node
from autopar.ir.placements import REPLICATE, Strategy, is_shard, shard_before, shard_dim

from .axis_names import weight_values
from .choices import Choice
from .constraints import Allowed, live_axes, samples_of, with_choices, zero_allows
from .formulation import Instance


@dataclass(frozen=True)
class Baseline:
    """A layout that people choose by hand, as a restriction of the search. Its price is the best that is possible
    within the restriction."""

    name: str
    instance: Instance


def baselines(instance: Instance) -> Iterator[Baseline]:
    """The baselines on the mesh of ``instance``; none on one device."""
    live = live_axes(instance.prices.mesh)
    if not live:
        return
    samples = Samples(instance.graph)
    outer, inner = live[:-1], live[-1]
    replicated = _narrowed(instance, samples, live)
    divides = samples.divide(instance, live)
    yield Baseline(
        "data parallel" if divides else "replicated weights", with_choices(replicated, _replicated, gathers=False)
    )
    yield Baseline("FSDP" if divides else "sharded weights", with_choices(replicated, _fully_sharded(instance)))
    tensor = with_choices(instance, samples.divided_over(outer)) if outer else instance
    for allowed in (_whole_outside(inner), _sharded_on(inner)):
        tensor = with_choices(tensor, allowed)
    beside = "data parallel" if samples.divide(instance, outer) else "replicated weights"
    label = f"tensor parallel {instance.prices.mesh[inner]}" + (f" x {beside}" if outer else "")
    yield Baseline(label, with_choices(tensor, lambda node, choice: True, gathers=False))


def _narrowed(instance: Instance, samples: Samples, axes: tuple[int, ...]) -> Instance:
    """The instance whose operations read unsharded weights and, where possible, only the device's own samples."""
    return with_choices(with_choices(instance, samples.takes_whole_weights), samples.divided_over(axes))


def _fully_sharded(instance: Instance) -> Allowed:
    """Allows parameters in shards, and weights outside of blocks also whole, which are gathered when they change."""
    shards_all, shards_state = zero_allows(instance, 3), zero_allows(instance, 2)

    def allowed(node: Node, choice: Choice) -> bool:
        if not isinstance(choice, ParameterPlacement) or shards_all(node, choice):
            return True
        is_whole = all(place == REPLICATE for place in choice.weight)
        return is_whole and not block_of(node.target) and shards_state(node, choice)

    return allowed


def _replicated(node: Node, choice: Choice) -> bool:
    return not isinstance(choice, ParameterPlacement) or all(place == REPLICATE for place in choice.optimizer)


def _whole_outside(inner: int) -> Allowed:
    """Allows parameters that rest as they are used, and that are sharded only on the axis ``inner``."""

    def allowed(node: Node, choice: Choice) -> bool:
        if not isinstance(choice, ParameterPlacement):
            return True
        outside = (place for axis, place in enumerate(choice.weight) if axis != inner)
        return choice.optimizer == choice.weight and all(place == REPLICATE for place in outside)

    return allowed


def _sharded_on(axis: int) -> Allowed:
    """Allows matrices and tables that are sharded on ``axis``."""

    def allowed(node: Node, choice: Choice) -> bool:
        return not isinstance(choice, ParameterPlacement) or node.type.rank < 2 or is_shard(choice.weight[axis])

    return allowed


def _is_divided(choice: Choice, axes: tuple[int, ...]) -> bool:
    """Whether an input is in shards of samples on each of ``axes``."""
    if not isinstance(choice, Strategy):
        return False
    places = [choice.outputs[0][axis] for axis in axes]
    return all(is_shard(place) and shard_dim(place) == 0 and shard_before(place) == 1 for place in places)


@dataclass(frozen=True)
class Samples:
    """Which operations of a graph read weights, and which of their operands depend on the samples of the batch."""

    graph: Graph

    @cached_property
    def weights(self) -> frozenset[str]:
        return weight_values(self.graph)

    @cached_property
    def dependent(self) -> frozenset[str]:
        """The nodes that depend on an input whose dim 0 is that of the batch."""
        inputs = self.graph.placeholders("input")
        batch = samples_of(self.graph)
        dependent = {node.name for node in inputs if node.type.rank and int(node.type.shape[0]) == batch > 1}
        for node in self.graph.nodes:
            if not dependent.isdisjoint([value.node for value in node.operands]):
                dependent.add(node.name)
        return frozenset(dependent)

    def divide(self, instance: Instance, axes: tuple[int, ...]) -> bool:
        """Whether devices along ``axes`` can have samples of their own, of every input that has the batch's."""
        groups = zip(instance.names, instance.choices, instance.problem.groups, strict=True)
        inputs = [(offered, group.cost) for name, offered, group in groups if self._has_samples(name)]
        return bool(inputs) and all(
            any(_is_divided(choice, axes) for choice, cost in zip(offered, costs, strict=True) if math.isfinite(cost))
            for offered, costs in inputs
        )

    def _has_samples(self, name: str) -> bool:
        return name in self.dependent and self.graph[name].op == "input"

    def takes_whole_weights(self, node: Node, choice: Choice) -> bool:
        """Whether an operation reads only unsharded weights, as they are stored under data parallelism."""
        if isinstance(choice, ParameterPlacement):
            return True
        places = zip(node.operands, choice.inputs, strict=True)
        return all(set(place) <= {REPLICATE} for value, place in places if value.node in self.weights)

    def divided_over(self, axes: tuple[int, ...]) -> Allowed:
        """Allows operations that read a weight if their other operands are sharded on each of ``axes``, and inputs that
        are replicated or sharded by samples."""

        def allowed(node: Node, choice: Choice) -> bool:
            if isinstance(choice, ParameterPlacement):
                return True
            if node.op == "input":
                return all(choice.outputs[0][axis] in (REPLICATE, Shard(0)) for axis in axes)
            if not any(value.node in self.weights for value in node.operands):
                return True
            places = zip(node.operands, choice.inputs, strict=True)
            own = (place for value, place in places if value.node in self.dependent)
            return all(is_shard(place[axis]) for place in own for axis in axes)

        return allowed
