"""What forward need not keep for the products of backward: elementwise operations make it again from what it keeps.

A normalisation's result and an activation's are operands of products, whose weights' gradients want them. Both are made
from other values that are kept (the normalisation's input, the product before the activation) without a product or a
collective: backward reads those, and writes the operand again, before it needs it. (Megatron-Core calls this
output-discarding recomputation: ``--recompute-modules layernorm moe_act``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from .graph import Graph, Value
from .kernels import is_heavy


def remakeable(graph: Graph, saved: tuple[Value, ...], moved: Set[tuple[Value, str]]) -> Mapping[Value, Set[Value]]:
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
