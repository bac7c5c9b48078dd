"""The products of a graph, the operations that read matrices or tables of weights, and how choices divide them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost import family_of
from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.ir.placements import is_shard
from autopar.placement.axis_names import weight_values
from autopar.placement.choices import Choice, operand_place

from .divided_values import Shards, shards_of
from .expert_blocks import OPERATIONS, routers

_LOOKUP = "aten.embedding.default"


@dataclass(frozen=True, eq=False)
class Products:
    """The products of an annotated graph, and how a choice divides them on each axis of a mesh with so many ``axes``.
    ``batch_dims``: the dim of the samples of each input that has one."""

    graph: Graph
    axes: int
    batch_dims: Mapping[str, int]

    @cached_property
    def weights(self) -> frozenset[str]:
        return weight_values(self.graph)

    @cached_property
    def names(self) -> frozenset[str]:
        """The nodes that are products."""
        return frozenset(self._sources)

    @cached_property
    def lookups(self) -> frozenset[str]:
        """Those that look rows of a table up."""
        return frozenset(name for name in self.names if self.graph[name].op == _LOOKUP)

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The matrices that tensor ranks divide: what products read, except those that choose experts. By the names of
        their nodes."""
        return frozenset().union(*self._sources.values()) - routers(self.graph)

    @cached_property
    def choosing(self) -> frozenset[str]:
        """The products that choose experts: tensor ranks need not divide them."""
        return frozenset(name for name, sources in self._sources.items() if not sources & self.parameters)

    @cached_property
    def dependent(self) -> frozenset[str]:
        """The nodes that depend on the samples of the batch."""
        names = {node.name for node in self.graph.placeholders("input") if node.target in self.batch_dims}
        for node in self.graph.nodes:
            if any(value.node in names for value in node.operands):
                names.add(node.name)
        return frozenset(names)

    @cached_property
    def samples(self) -> tuple[Shards, ...]:
        """For each axis: the placements whose shards on it mean different samples."""
        return tuple(shards_of(self.graph, axis, self.batch_dims, self._read) for axis in range(self.axes))

    @cached_property
    def positions(self) -> tuple[Shards, ...]:
        """For each axis: the placements whose shards on it mean different positions of the sequence, dim 1 of every
        input."""
        dims = {node.target: 1 for node in self.graph.placeholders("input") if node.type.rank > 1}
        return tuple(shards_of(self.graph, axis, dims, self._read) for axis in range(self.axes))

    def divided(self, node: Node, choice: Choice, axis: int) -> str:
        """How ``choice`` divides a product on ``axis``: by ``"data"``, ``"context"`` or ``"tensor"``, or ``"none"``;
        ``"weight"`` if it reads nothing but weights, and these whole; ``"some"`` for shards of which it is not known
        what they are of."""
        matrices = self._matrices(node)
        if any(is_shard(operand_place(choice, i)[axis]) for i in matrices):
            return "tensor"
        rows = [i for i, v in enumerate(node.operands) if v.node in self.dependent and i not in matrices]
        if not rows:
            return "weight"
        shards = [(node.operands[i], place) for i in rows if is_shard((place := operand_place(choice, i))[axis])]
        for name, known in (("data", self.samples[axis]), ("context", self.positions[axis])):
            if any(place in known.get(value, ()) for value, place in shards):
                return name
        return "some" if shards else "none"

    @cached_property
    def _sources(self) -> dict[str, frozenset[str]]:
        """The parameters of each product's matrices."""
        sources: dict[str, frozenset[str]] = {}
        for node in self.graph.nodes:
            matrices = self._matrices(node) if _multiplies(node) else []
            if matrices:
                sources[node.name] = frozenset().union(*(self._origins[node.operands[i].node] for i in matrices))
        return sources

    @cached_property
    def _read(self) -> dict[str, list[int]]:
        """Which operands of each product are weights."""
        return {name: self._weights_of(self.graph[name]) for name in self.names}

    @cached_property
    def _origins(self) -> dict[str, frozenset[str]]:
        """The parameters from which each weight, or view or cast of one, is computed."""
        origins: dict[str, frozenset[str]] = {}
        for node in self.graph.nodes:
            if node.name in self.weights:
                own = [origins[value.node] for value in node.operands]
                origins[node.name] = frozenset().union(*own) if own else frozenset((node.name,))
        return origins

    @cached_property
    def views(self) -> frozenset[str]:
        """:attr:`parameters` with their views and casts."""
        return frozenset(name for name, own in self._origins.items() if own and own <= self.parameters)

    def _matrices(self, node: Node) -> list[int]:
        """The operands of a node that are matrices or tables of weights."""
        return [i for i in self._weights_of(node) if self.graph.type_of(node.operands[i]).rank > 1]

    def _weights_of(self, node: Node) -> list[int]:
        return [i for i, value in enumerate(node.operands) if value.node in self.weights]


def _multiplies(node: Node) -> bool:
    return node.op in OPERATIONS or node.op == _LOOKUP or family_of(node.op).matrix is not None
