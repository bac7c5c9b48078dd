"""Removes operations and constants that no output needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.passes.base import Pass


@dataclass(frozen=True)
class RemoveDead(Pass):
    """Removes operations and lifted constants that no output needs. Other placeholders stay, since they are the calling
    convention."""

    name: ClassVar[str] = "remove-dead"

    def apply(self, graph: Graph) -> Graph:
        return remove_dead(graph)


def remove_dead(graph: Graph) -> Graph:
    """See :class:`RemoveDead`."""
    alive = graph.without_dead()
    if not alive.constants and all(node.op != "constant" for node in alive.nodes):
        return alive
    used = {value.node for node in alive.nodes for value in node.operands} | {v.node for v in alive.output_values}
    nodes = tuple(node for node in alive.nodes if node.op != "constant" or node.name in used)
    constants = {name: tensor for name, tensor in graph.constants.items() if name in used}
    return replace(alive, nodes=nodes, constants=constants)
