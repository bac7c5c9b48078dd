"""Operations of which some results are sums across rows, as the two operations that they are on CPUs.

The gradient of a layer norm's input is found by row, those of its weight and bias are sums over all rows
(:mod:`.reductions`). Where those are kernels of their own, what computes them reads the rows again:

    %g: f32[64, 8], %g.1: f32[8], %g.2: f32[8] = aten.native_layer_norm_backward.default(%d, %x, [8], ...)

counts as two such operations, ``g`` with the first result and ``g_across`` with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value, fresh_name

from .share import Share

# The results that are sums across rows.
_ACROSS: Mapping[str, tuple[int, ...]] = {"aten.native_layer_norm_backward.default": (1, 2)}
_COPY = "_across"


def with_sums_apart(graph: Graph) -> tuple[Graph, Mapping[str, str]]:
    """The graph with such operations in two, and those with sums, each with the one that it is of."""
    names, copies = {node.name for node in graph.nodes}, dict[str, str]()
    nodes = list[Node]()

    def moved(value: Value) -> Value:
        name = copies.get(value.node)
        across = _ACROSS.get(graph[value.node].op, ()) if name is not None else ()
        return Value(name, value.index) if name is not None and value.index in across else value

    for node in graph.nodes:
        node = node.map_values(moved)
        across = [i for i in _ACROSS.get(node.op, ()) if node.types[i] is not None]
        if not across or node.types[0] is None:
            nodes.append(node)
            continue
        copies[node.name] = fresh_name(node.name + _COPY, names)
        rows = tuple(None if i in across else kind for i, kind in enumerate(node.types))
        sums = tuple(kind if i in across else None for i, kind in enumerate(node.types))
        nodes += [replace(node, types=rows), replace(node, name=copies[node.name], types=sums)]
    outputs = tuple(replace(one, value=one.value and moved(one.value)) for one in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs), {copy: name for name, copy in copies.items()}


def is_sum_apart(node: Node) -> bool:
    """Whether a node is such an operation with its sums alone."""
    return node.op in _ACROSS and node.types[0] is None


def share_of_both(first: Share, second: Share) -> Share:
    """The share of an operation that is two, with that of its sums."""
    reads = tuple(map(sum, zip(first.reads, second.reads, strict=True)))
    writes = tuple(map(max, zip(first.writes, second.writes, strict=True)))
    return Share(first.launches + second.launches, reads, writes)
