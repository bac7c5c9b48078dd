"""Which sums of a product and a bias run as one operation.

Decompositions take ``addmm`` apart, because a product and a sum have simpler rules; where both are placed alike they
are one operation again when lowered. It saves a tensor of the size of the result, which on processors whose caches it
leaves takes longer than the sum itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ir.placements import Strategy

PRODUCT, SUM, FUSED = "aten.mm.default", "aten.add.Tensor", "aten.addmm.default"


def biased_products(graph: Graph, strategy: Callable[[Node], Strategy]) -> Mapping[str, str]:
    """By the name of each such sum that of its product: nothing else uses that, both are of one phase, the bias is a
    vector as long as a row, and nothing is resharded between them."""
    kept = set(graph.output_values)
    return {
        node.name: product.name
        for node in graph.nodes
        if node.op == SUM and not node.kwargs and len(node.args) == len(node.operands) == 2
        for product, at in _products(graph, node)
        if Value(product.name) not in kept
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
