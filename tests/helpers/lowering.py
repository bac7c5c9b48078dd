"""A graph as one device runs it: without saved activations."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.passes.base import rewrite


def plain(graph: Graph) -> Graph:
    """The graph with every saved activation replaced by what it saves."""

    def visit(node: Node) -> Node | Value:
        return node.operands[0] if node.op == SAVED_ACTIVATION else node

    return rewrite(graph, visit)
