"""Finds the values of a graph that depend on data alone."""

from __future__ import annotations

from autopar.ir.graph import Graph


def data_only_nodes(graph: Graph) -> frozenset[str]:
    """Names of the nodes whose values depend only on inputs, buffers, constants and random draws, including these
    placeholders: not on parameters, tangents, or values that another part of the model would have to send."""
    return graph.once(data_only_nodes, lambda: _data_only_nodes(graph))


def _data_only_nodes(graph: Graph) -> frozenset[str]:
    names: set[str] = set()
    for node in graph:
        if node.is_placeholder:
            if node.op in ("input", "buffer", "constant", "random"):
                names.add(node.name)
        elif all(value.node in names for value in node.operands):
            names.add(node.name)
    return frozenset(names)
