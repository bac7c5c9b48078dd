"""Where torch's own operation can run in place of those it was decomposed into, and what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch.distributed.tensor import Partial

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, TensorType, Value, values_in
from autopar.ir.placements import Placements, Strategy

from .pattern import Match, Occurrences, Pattern


@dataclass(frozen=True)
class Replacement:
    """``nodes`` that compute ``values[old]`` in place of each ``old``; ``strategies`` of the nodes by name."""

    nodes: tuple[Node, ...]
    strategies: Mapping[str, Strategy]
    values: Mapping[Value, Value]


@dataclass(frozen=True)
class Site:
    """A ``match`` of ``pattern`` in a placed graph; ``earlier``: the replacements that forward has, by the values that
    their matches have."""

    occurrences: Occurrences
    assignment: Assignment
    pattern: Pattern
    match: Match
    earlier: Mapping[Value, Site] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.occurrences.graph

    def __getitem__(self, name: str) -> Value:
        return self.match[name]

    def argument(self, name: str) -> Arg:
        return self.match.arguments[name]

    def type(self, name: str) -> TensorType:
        return self.graph.type_of(self.match[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self.type(name).shape)

    def node(self, name: str) -> Node:
        """The node of the pattern's instruction ``name``."""
        return self.match.nodes[name]

    def home(self, value: Value) -> Placements:
        """The placements of a value where it is computed."""
        strategies, parameters = self.assignment.strategies, self.assignment.parameters
        if value.node in parameters:
            return parameters[value.node].weight
        known = strategies.get(value.node)
        return self.assignment.replicated if known is None else known.outputs[value.index]

    def runs_whole(self, kept: frozenset[str] = frozenset()) -> bool:
        """Whether the matched operations run on each device's own shards with nothing between them: in one phase, none
        leaves a partial sum or runs in another form, nothing is resharded on the way, and nothing else needs what they
        compute, but the pattern's outputs and the values ``kept``."""
        nodes = list(self.match.nodes.values())
        one_phase = len({node.phase for node in nodes}) == 1
        return one_phase and all(map(self._is_plain, nodes)) and not self._leaks(kept)

    def _is_plain(self, node: Node) -> bool:
        strategy = self.assignment.strategies.get(node.name)
        if strategy is None:
            return all(set(self.home(v)) <= set(self.assignment.replicated) for v in node.operands)
        if strategy.local or any(isinstance(p, Partial) for places in strategy.places for p in places):
            return False
        arrivals = zip(node.operands, strategy.inputs, strict=True)
        return all(self.home(v) == place == self.home(self.occurrences.base(v)) for v, place in arrivals)

    def _leaks(self, kept: frozenset[str]) -> bool:
        inside = {node.name for node in self.match.nodes.values()}
        given = {self.match.values[value] for value in self.pattern.section.outputs if value is not None}
        returned = {self.occurrences.base(value) for value in self.graph.output_values}
        for own, value in self.match.values.items():
            if own.node not in self.match.nodes or value in given or own.node in kept:
                continue
            users = {node.name for node in self.occurrences.users.get(value, ())}
            if value in returned or not users <= inside:
                return True
        return False

    def make(
        self,
        like: Node,
        op: str,
        args: tuple[Arg, ...],
        types: tuple[TensorType | None, ...],
        places: tuple[Placements, ...],
        made: Mapping[Value, Placements] = MappingProxyType({}),
    ) -> tuple[Node, Strategy]:
        """A node with the name, the module and the phase of ``like``, and its strategy; ``places``: of its results,
        ``made``: of operands that are new themselves."""
        node = Node(like.name, op, args, (), types, like.module, like.source, like.phase)
        return node, Strategy(tuple(made.get(v) or self.home(v) for v in values_in(args)), places)

    def replace_one(self, name: str, op: str, args: tuple[Arg, ...]) -> Replacement:
        """The replacement whose one operation computes the pattern's value ``name``."""
        value = self[name]
        node, strategy = self.make(self.node(name), op, args, (self.type(name),), (self.home(value),))
        return Replacement((node,), {node.name: strategy}, {value: Value(node.name)})


@dataclass(frozen=True)
class Rewrite:
    """``build`` makes the replacement of a match of ``pattern``, or None if the numbers in it say that it is something
    else. ``kept``: values of the pattern that others may use too, in which case they are computed as before."""

    pattern: Pattern
    build: Callable[[Site], Replacement | None]
    kept: frozenset[str] = frozenset()
