"""What the values of a graph depend on."""

from __future__ import annotations

from autopar.ir.graph import Graph


def data_only_nodes(graph: Graph) -> frozenset[str]:
    """Names of the nodes whose values depend on inputs, buffers, constants and random draws alone: no parameter, no
    tangent, and nothing another part of the model would have to send. Those placeholders are among them."""
    found: set[str] = set()
    for node in graph:
        if node.is_placeholder:
            if node.op in ("input", "buffer", "constant", "random"):
                found.add(node.name)
        elif all(value.node in found for value in node.operands):
            found.add(node.name)
    return frozenset(found)
