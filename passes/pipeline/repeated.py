"""Which operations every chunk of a cut graph repeats that uses their results, instead of receiving these."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import CAST, VIEWS, Node, Value
from autopar.ir.program import is_random

from .data_only import data_only_nodes


def repeated_nodes(graph: Graph) -> frozenset[str]:
    """Views, operations that depend on data alone, and those of backward that read no gradient."""
    return graph.once(repeated_nodes, lambda: _repeated_nodes(graph))


def _repeated_nodes(graph: Graph) -> frozenset[str]:
    data, repeated, driven = data_only_nodes(graph), set[str](), set[str]()
    for node in graph:
        if node.is_placeholder:
            driven.update([node.name] if node.op == "tangent" else [])
            continue
        if node.phase == "backward" and any(value.node in driven for value in node.operands):
            driven.add(node.name)
        elif is_random(node.op):
            continue
        elif node.phase == "backward" or node.name in data or _is_view(graph, node):
            repeated.add(node.name)
    return frozenset(repeated)


def _is_view(graph: Graph, node: Node) -> bool:
    if node.op == CAST:
        return int(node.type.bytes) > int(graph.type_of(node.operands[0]).bytes)
    return node.op in VIEWS


def copies_in_backward(graph: Graph) -> Mapping[str, str]:
    """Repeated operations of backward that compute what an operation of forward does that is not repeated: by name, its
    name."""
    return graph.once(copies_in_backward, lambda: _copies_in_backward(graph))


def _copies_in_backward(graph: Graph) -> Mapping[str, str]:
    repeated, forward, same = repeated_nodes(graph), dict[object, str](), dict[str, str]()

    def moved(value: Value) -> Value:
        return Value(same[value.node], value.index) if value.node in same else value

    def computed(node: Node) -> object:
        # By the text of arguments: 1, 1.0 and True differ, and so do 0.0 and -0.0.
        return node.form, node.operands, node.types

    for node in graph:
        if node.phase == "forward" and not node.is_placeholder:
            forward.setdefault(computed(node), node.name)
        elif node.name in repeated:
            found = forward.get(computed(node.map_values(moved)))
            same |= {} if found is None else {node.name: found}
    return {name: found for name, found in same.items() if found not in repeated}
