"""Fuses products with the bias that is added to them.

Decompositions split ``addmm``, because a product and a sum have simpler rules. Where both have the same placements,
lowering joins them again. This saves a tensor of the size of the result; once it exceeds the processor's cache, writing
and reading it takes longer than the sum itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ir.placements import Strategy

PRODUCT, SUM, FUSED = "aten.mm.default", "aten.add.Tensor", "aten.addmm.default"


def biased_products(graph: Graph, strategy: Callable[[Node], Strategy]) -> Mapping[str, str]:
    """The name of the product for the name of each sum that can be fused with it: nothing else uses the product, both
    are in the same phase, the bias is a vector as long as a row, and nothing is resharded between them."""
    outputs = set(graph.output_values)
    return {
        node.name: product.name
        for node in graph.nodes
        if node.op == SUM and not node.kwargs and len(node.args) == len(node.operands) == 2
        for product, at in _products(graph, node)
        if Value(product.name) not in outputs
        and len(graph.users[Value(product.name)]) == 1
        and _is_bias(graph, node, product, node.operands[1 - at])
        and strategy(product).outputs[0] == strategy(node).inputs[at]
        and not strategy(product).local + strategy(node).local
    }


def _products(graph: Graph, node: Node) -> Iterator[tuple[Node, int]]:
    for at, value in enumerate(node.operands):
        product = graph[value.node]
        if product.op == PRODUCT and product.phase == node.phase and not product.kwargs:
            yield product, at


def _is_bias(graph: Graph, node: Node, product: Node, value: Value) -> bool:
    kind = graph.type_of(value)
    same = kind.dtype == product.type.dtype == node.type.dtype
    return same and value.node != product.name and tuple(kind.shape) == tuple(product.type.shape[1:])
