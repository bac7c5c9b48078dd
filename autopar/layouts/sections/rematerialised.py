"""What forward need not keep for the products of backward: elementwise operations make it again from what it keeps.

A normalisation's result and an activation's are operands of products, whose weights' gradients want them. Both are made
from other values that are kept (the normalisation's input, the product before the activation) without a product or a
collective: backward reads those, and writes the operand again, before it needs it. (Megatron-Core calls this
output-discarding recomputation: ``--recompute-modules layernorm moe_act``.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

from .fusion import Kernels, is_alias, is_heavy, origin


def rematerialisable(
    graph: Graph, saved: tuple[Value, ...], moved: Set[tuple[Value, str]]
) -> Mapping[Value, Set[Value]]:
    """Of the values kept for backward those that elementwise operations make from the others, and from which.

    Args:
        saved: in the order in which forward makes them.
        moved: values and the operations that take them resharded.
    """
    kept, found = set(saved), dict[Value, Set[Value]]()
    for value in saved:
        sources = _sources(graph, value, kept - {value}, moved)
        if sources:
            found[value] = sources
            kept.remove(value)
    return found


def _sources(graph: Graph, value: Value, kept: Set[Value], moved: Set[tuple[Value, str]]) -> Set[Value] | None:
    """What a value is made from, of ``kept`` and of what needs no keeping; None if it is made from anything else."""
    if value in kept:
        return {value}
    node = graph[value.node]
    if node.is_placeholder:
        return set()
    if node.phase == "backward" or is_heavy(node):
        return None
    found = set[Value]()
    for operand in node.operands:
        sources = None if (operand, node.name) in moved else _sources(graph, operand, kept, moved)
        if sources is None:
            return None
        found |= sources
    return found


def rematerialised_nodes(graph: Graph, rematerialised: Mapping[Value, Set[Value]]) -> frozenset[str]:
    """The operations that make values again from what :func:`rematerialisable` says."""
    found = set[str]()
    for value, sources in rematerialised.items():
        waiting = [value]
        while waiting:
            node = graph[waiting.pop().node]
            if not node.is_placeholder and node.name not in found:
                found.add(node.name)
                waiting += [operand for operand in node.operands if operand not in sources]
    return frozenset(found)


@dataclass(frozen=True)
class Rematerialised:
    """What backward computes again of named modules: the operations ``nodes`` (by name), whose results ``dropped`` need
    not be kept for it, from values of which ``taken`` would not be kept otherwise."""

    nodes: frozenset[str] = frozenset()
    dropped: frozenset[Value] = frozenset()
    taken: frozenset[Value] = frozenset()


def computed_again(
    kernels: Kernels, named: Callable[[Node], bool], section_of_node: Mapping[str, str]
) -> Rematerialised:
    """What is computed again so that none of the values saved for backward is kept that ``named`` operations make;
    those are part of it which lead to such a value, back to the first that none of them makes. What a section hands to
    another one, ``section_of_node`` being that of each operation, is kept: each is computed again by itself, from what
    comes into it."""
    graph, kept = kernels.graph, set(kernels.saved)
    handed_on = _handed_on(kernels, section_of_node)

    def stays(value: Value) -> bool:
        return value in handed_on or not named(graph[value.node])

    dropped = frozenset(value for value in kept if not stays(value))
    nodes, outside = set[str](), set[Value]()
    waiting = list(dropped)
    while waiting:
        value = waiting.pop()
        node = graph[value.node]
        if stays(value):
            outside.add(value)
        elif node.name not in nodes:
            nodes.add(node.name)
            waiting += (origin(graph, operand) for operand in node.operands)
    taken = frozenset(value for value in outside - kept if not graph[value.node].is_placeholder)
    return Rematerialised(frozenset(nodes), dropped, taken)


def _handed_on(kernels: Kernels, section_of_node: Mapping[str, str]) -> Set[Value]:
    """What another section takes in forward; where backward makes that again, what it is made from."""
    graph, found = kernels.graph, set[Value]()
    forward = (node for node in graph.nodes if node.phase == "forward" and not is_alias(node))
    takes = ((origin(graph, operand), section_of_node[node.name]) for node in forward for operand in node.operands)
    waiting = [value for value, home in takes if section_of_node[value.node] != home]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += kernels.rematerialised.get(value, ())
    return found
