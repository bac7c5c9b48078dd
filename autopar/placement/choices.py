"""The choices of an annotated graph on a mesh: the classes of its nodes, and the choices of each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.assignment import Offloaded, ParameterPlacement, Recomputed
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.ir.placements import REPLICATE, Placements, Strategy
from autopar.offload import TIERS, Destination
from autopar.optimizers import optimizer_bytes
from autopar.passes.recompute.recomputable import Recomputable

from .parameter_choices import parameter_choices, with_state_in, with_weight_in_host
from .placed_step import trained
from .prices import Prices

Choice = Strategy | ParameterPlacement
# The consumer of the model's results, which needs them replicated: a class with one choice.
OUTPUTS = "(outputs)"


@dataclass(frozen=True, eq=False)
class ChoiceSets:
    """The classes of an annotated graph, and their choices. The fields are arguments of
    :func:`autopar.placement.formulation.build_instance`. Without ``graph.classes`` every node is its own class."""

    graph: Graph
    prices: Prices
    optimizer: str
    repeats: Repeats = ONCE
    recomputable: Recomputable | None = None
    offload: frozenset[Destination] = frozenset()
    multiplicity: Mapping[str, int] = field(default_factory=dict)

    def class_of(self, node: str) -> str:
        return self.graph.classes.get(node, node)

    def count_of(self, node: str) -> int:
        """How many nodes of the whole model a node represents."""
        return self.multiplicity.get(node, 1)

    @cached_property
    def counts(self) -> Counter[str]:
        """The number of nodes of each class."""
        if not self.multiplicity:
            return self.graph.once("sizes of classes", lambda: self._counted())
        return self._counted()

    def _counted(self) -> Counter[str]:
        counts = Counter[str]()
        for node in self.graph.nodes:
            counts[self.class_of(node.name)] += self.count_of(node.name)
        return counts

    @cached_property
    def choices(self) -> Mapping[str, tuple[Choice, ...]]:
        """The choices of each class, in the order of groups."""
        return {name: self._choices(name) for name in (*self.counts, OUTPUTS)}

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The group of each class."""
        return {name: i for i, name in enumerate(self.choices)}

    @cached_property
    def trained(self) -> frozenset[str]:
        """Paths of the parameters that get a gradient."""
        return frozenset(trained(self.graph))

    @cached_property
    def results(self) -> frozenset[Value | None]:
        """The values that the model returns or writes to its buffers."""
        caches = self.graph.caches
        return frozenset(
            o.value for o in self.graph.outputs if o.kind == "output" or (o.kind == "mutation" and o.name not in caches)
        )

    def may_run_again(self, name: str) -> bool:
        return self.recomputable is not None and name in self.recomputable.nodes

    def may_offload(self, name: str) -> bool:
        """Whether a node is a saved activation that may rest in host memory."""
        return ("activations", "host") in self.offload and self.graph[name].op == SAVED_ACTIVATION

    def _choices(self, name: str) -> tuple[Choice, ...]:
        if name == OUTPUTS:
            return (Strategy(((REPLICATE,) * len(self.prices.mesh),), ()),)
        strategies = self.graph.strategies[name]
        if self.graph[name].op == "param":
            return self._parameter_choices(strategies, self.graph[name])
        again = tuple(map(recomputed_strategy, strategies)) if self.may_run_again(name) else ()
        return (*strategies, *again, *(map(offloaded_strategy, strategies) if self.may_offload(name) else ()))

    def _parameter_choices(self, strategies: tuple[Strategy, ...], node: Node) -> tuple[ParameterPlacement, ...]:
        is_trained = node.target in self.trained
        places = parameter_choices(strategies, is_trained)
        has_state = is_trained and optimizer_bytes(self.optimizer, node.stored)
        tiers = [tier for tier in TIERS["optimizer"] if ("optimizer", tier) in self.offload and has_state]
        places = (*places, *(place for tier in tiers for place in with_state_in(tier, places)))
        return (*places, *(with_weight_in_host(places) if ("weights", "host") in self.offload else ()))


def recomputed_strategy(strategy: Strategy) -> Recomputed:
    """The choice to run ``strategy`` in forward and again in backward."""
    return Recomputed(strategy.inputs, strategy.outputs, strategy.local)


def offloaded_strategy(strategy: Strategy) -> Offloaded:
    """The choice to keep a saved activation in host memory until backward."""
    return Offloaded(strategy.inputs, strategy.outputs, strategy.local)


def result_place(choice: Choice, result: int) -> Placements:
    return choice.weight if isinstance(choice, ParameterPlacement) else choice.outputs[result]


def operand_place(choice: Choice, operand: int) -> Placements:
    """Operand -1 is what a placeholder gets at the end of a step: the gradient of a parameter, the new value of a
    cache."""
    if isinstance(choice, ParameterPlacement):
        return choice.gradient
    return choice.inputs[operand] if operand >= 0 else choice.outputs[0]
