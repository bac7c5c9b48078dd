"""The choices of an annotated graph on a mesh: the classes of its nodes, and the choices of each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.assignment import ParameterPlacement, Recomputed
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats
from autopar.ir.node import Node, Value
from autopar.ir.placements import REPLICATE, Placements, Strategy
from autopar.optimizers import optimizer_bytes
from autopar.passes.recompute.recomputable import Recomputable

from .parameter_choices import in_host_memory, parameter_choices
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
    offload: bool = False
    multiplicity: Mapping[str, int] = field(default_factory=dict)

    def class_of(self, node: str) -> str:
        return self.graph.classes.get(node, node)

    def count_of(self, node: str) -> int:
        """How many nodes of the whole model a node represents."""
        return self.multiplicity.get(node, 1)

    @cached_property
    def counts(self) -> Counter[str]:
        """The number of nodes of each class."""
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
        return frozenset(o.value for o in self.graph.outputs if o.kind in ("output", "mutation"))

    def may_run_again(self, name: str) -> bool:
        return self.recomputable is not None and name in self.recomputable.nodes

    def _choices(self, name: str) -> tuple[Choice, ...]:
        if name == OUTPUTS:
            return (Strategy(((REPLICATE,) * len(self.prices.mesh),), ()),)
        strategies = self.graph.strategies[name]
        if self.graph[name].op == "param":
            return self._parameter_choices(strategies, self.graph[name])
        if self.may_run_again(name):
            return (*strategies, *map(recomputed_strategy, strategies))
        return strategies

    def _parameter_choices(self, strategies: tuple[Strategy, ...], node: Node) -> tuple[ParameterPlacement, ...]:
        is_trained = node.target in self.trained
        places = parameter_choices(strategies, is_trained)
        has_state = is_trained and optimizer_bytes(self.optimizer, node.stored)
        return (*places, *in_host_memory(places)) if self.offload and has_state else places


def recomputed_strategy(strategy: Strategy) -> Recomputed:
    """The choice to run ``strategy`` in forward and again in backward."""
    return Recomputed(strategy.inputs, strategy.outputs, strategy.local)


def result_place(choice: Choice, result: int) -> Placements:
    return choice.weight if isinstance(choice, ParameterPlacement) else choice.outputs[result]


def operand_place(choice: Choice, operand: int) -> Placements:
    return choice.gradient if isinstance(choice, ParameterPlacement) else choice.inputs[operand]
