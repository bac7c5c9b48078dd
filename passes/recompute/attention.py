"""Finds attention that is written out in products instead of called as one operation."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

# Matrix products; those of two activations belong to attention written out.
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "bmm", "baddbmm"))
# What no path inside of attention goes through: products with weights, another attention, and lookups.
_ENDS = _PRODUCTS | {
    *(f"aten.{name}.default" for name in ("addmm", "convolution", "embedding", "topk", "sort", "cumsum")),
    *("aten.index.Tensor", "autopar.attention.default"),
}
# What makes probabilities of scores: softmax, or what it is written out in.
_SOFTMAX = frozenset(("aten._softmax.default", "aten._safe_softmax.default", "aten.exp.default"))


def inside_attention(graph: Graph) -> frozenset[str]:
    """Forward nodes from a product of two activations to the next such product that takes its result, with the
    elementwise operations and reductions between them, in whatever modules these are: scores and everything computed
    from them up to the product with the values (Korthikanti et al. 2022, section 5)."""
    products, inside = _of_activations(graph), set[str]()
    after: set[str] = set()
    for node in graph.nodes:
        if node.phase != "forward" or node.is_placeholder:
            continue
        behind = any(value.node in after for value in node.operands)
        if node.name in products:
            after.add(node.name)
            if behind:
                inside |= {node.name, *_back_to_products(graph, node.operands, products, after)}
        elif behind and node.op not in _ENDS:
            after.add(node.name)
    return frozenset(inside)


def products_with_values(graph: Graph) -> Iterator[Node]:
    """The forward products softmax(Q K^T) V: of two activations, one of which is computed by a softmax from another
    such product."""
    products, scores, probabilities = _of_activations(graph), set[str](), set[str]()
    for node in graph.nodes:
        if node.phase != "forward" or node.is_placeholder:
            continue
        taken = {value.node for value in node.operands}
        if node.name in products:
            if taken & probabilities:
                yield node
            scores.add(node.name)
        elif node.op not in _ENDS and taken & (scores | probabilities):
            is_probability = taken & probabilities or node.op in _SOFTMAX
            (probabilities if is_probability else scores).add(node.name)


def _of_activations(graph: Graph) -> frozenset[str]:
    """The forward products of which two operands depend on inputs of the model, or on another stage."""
    data: set[str] = set()
    products: set[str] = set()
    for node in graph.nodes:
        varying = sum(value.node in data for value in node.operands)
        if node.op in ("input", "receive") or varying:
            data.add(node.name)
        if node.op in _PRODUCTS and node.phase == "forward" and varying > 1:
            products.add(node.name)
    return frozenset(products)


def _back_to_products(graph: Graph, operands: tuple[Value, ...], products: frozenset[str], after: set[str]) -> set[str]:
    """The nodes behind a product, ``after``, from ``operands`` back to the products that they are computed from."""
    names, waiting = set[str](), [value.node for value in operands]
    while waiting:
        name = waiting.pop()
        if name in after and name not in names:
            names.add(name)
            if name not in products:
                waiting += [value.node for value in graph[name].operands]
    return names
