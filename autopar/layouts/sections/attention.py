"""Finds the inside of attention where it is written out in products instead of called as one kernel."""

from __future__ import annotations

from autopar.cost import family_of
from autopar.ir.graph import Graph
from autopar.placement.axis_names import weight_values

from .fusion import is_heavy


def inside_attention(graph: Graph) -> frozenset[str]:
    """Forward nodes from a product of two activations to the next such product that takes its result, with the
    elementwise operations and reductions between them."""
    derived = weight_values(graph)
    products = {
        node.name
        for node in graph.nodes
        if node.phase == "forward"
        and is_heavy(node)
        and family_of(node.op).matrix is not None
        and not any(value.node in derived for value in node.operands)
    }
    after: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.phase != "forward" or node.is_placeholder:
            continue
        if node.name in products:
            after[node.name] = {node.name}
        elif not is_heavy(node):
            after[node.name] = set().union(*(after.get(v.node, set()) for v in node.operands))
    inside: set[str] = set()
    for node in graph.nodes:
        if node.name in products:
            for value in node.operands:
                if after.get(value.node):
                    inside |= {node.name, *_back_to_products(graph, value.node, products)}
    return frozenset(inside)


def _back_to_products(graph: Graph, name: str, products: set[str]) -> set[str]:
    """Nodes from ``name`` back to the products it is computed from."""
    names, waiting = set[str](), [name]
    while waiting:
        node = graph[waiting.pop()]
        if node.name in names or node.is_placeholder or (is_heavy(node) and node.name not in products):
            continue
        names.add(node.name)
        if node.name not in products:
            waiting += [value.node for value in node.operands]
    return names
