"""Which operations are the inside of attention that is written out in products, not called as one kernel."""

from __future__ import annotations

from autopar.cost import family_of
from autopar.ir.graph import Graph
from autopar.placement.axis_names import weight_values

from .fusion import is_heavy


def inside_attention(graph: Graph) -> frozenset[str]:
    """Forward nodes from a product of two activations up to the next one that takes its result, elementwise operations
    and reductions between: the inside of attention written out."""
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
    found: set[str] = set()
    for node in graph.nodes:
        if node.name in products:
            for value in node.operands:
                if after.get(value.node):
                    found |= {node.name, *_way_back(graph, value.node, products)}
    return frozenset(found)


def _way_back(graph: Graph, name: str, products: set[str]) -> set[str]:
    """Nodes from ``name`` back to the products it comes from."""
    found, open_now = set[str](), [name]
    while open_now:
        node = graph[open_now.pop()]
        if node.name in found or node.is_placeholder or (is_heavy(node) and node.name not in products):
            continue
        found.add(node.name)
        if node.name not in products:
            open_now += [value.node for value in node.operands]
    return found
