"""Recomputes views and constants in backward rather than saving them from forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import VIEWS, Node, Value
from autopar.passes.base import Pass, is_pure


@dataclass(frozen=True)
class SinkViews(Pass):
    """Example: backward saves ``%x`` rather than its transpose. From ::

        %y: f32[4, b] = aten.permute.default(%x, [1, 0])
        backward %g: f32[4, 8] = aten.mm.default(%y, %dz)

    it makes ::

        %y: f32[4, b] = aten.permute.default(%x, [1, 0])
        backward %y_again: f32[4, b] = aten.permute.default(%x, [1, 0])
        backward %g: f32[4, 8] = aten.mm.default(%y_again, %dz)

    A ``reshape``, ``permute`` or ``expand`` of forward that backward reads is repeated in backward, and so is its
    operand, so that no saved value is a view of another. The same holds for values computed from no tensors or only
    from lifted constants.
    """

    name: ClassVar[str] = "sink-views"

    def apply(self, graph: Graph) -> Graph:
        return sink_views(graph)


def sink_views(graph: Graph) -> Graph:
    """See :class:`SinkViews`."""
    sinkable = _sinkable(graph)
    sinker = _Sinker(graph, sinkable)
    for node in graph.nodes:
        sinker.add(node)
    return replace(graph, nodes=tuple(sinker.nodes))


def _sinkable(graph: Graph) -> frozenset[str]:
    """Forward nodes that cost almost nothing to repeat."""
    fixed = {node.name for node in graph.nodes if node.op == "constant"}
    sinkable: set[str] = set()
    for node in graph.nodes:
        if node.is_placeholder or not is_pure(node.op):
            continue
        if all(value.node in fixed for value in node.operands):
            fixed.add(node.name)
            sinkable.add(node.name)
        elif node.op in VIEWS:
            sinkable.add(node.name)
    return frozenset(name for name in sinkable if graph[name].phase == "forward")


class _Sinker:
    """Copies nodes in order, and repeats each sinkable node before its first user in backward."""

    def __init__(self, graph: Graph, sinkable: frozenset[str]) -> None:
        self.graph, self.sinkable = graph, sinkable
        self.nodes: list[Node] = []
        self.again: dict[str, str] = {}

    def add(self, node: Node) -> None:
        sinks = node.phase == "backward" and any(value.node in self.sinkable for value in node.operands)
        self.nodes.append(node.map_values(self._repeated) if sinks else node)

    def _repeated(self, value: Value) -> Value:
        if value.node not in self.sinkable:
            return value
        if value.node not in self.again:
            self.again[value.node] = self._name(value.node)
            node = self.graph[value.node].map_values(self._repeated)
            self.nodes.append(node.named(self.again[value.node], "backward"))
        return Value(self.again[value.node], value.index)

    def _name(self, base: str) -> str:
        name = f"{base}_again"
        while name in self.graph:
            name += "_again"
        return name
