"""Finds values that forward need not save because elementwise operations can recompute them from saved values.

The results of normalisations and activations are operands of products, and the weights' gradients need them. Both can
be recomputed from other saved values (the normalisation's input, the product before the activation) without a product
or a collective: backward reads those, and writes the operand again before it is needed. (Megatron-Core calls this
output-discarding recomputation: ``--recompute-modules layernorm moe_act``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from autopar.cost.kernels.kernel import is_heavy
from autopar.ir.graph import Graph
from autopar.ir.node import Value


def rematerialisable(
    graph: Graph, saved: tuple[Value, ...], moved: Set[tuple[Value, str]]
) -> Mapping[Value, Set[Value]]:
    """The values saved for backward that elementwise operations can recompute from the others, each with its sources.

    Args:
        saved: in the order in which forward computes them.
        moved: values and the operations that read them resharded.
    """
    kept, sources_of = set(saved), dict[Value, Set[Value]]()
    for value in saved:
        sources = _sources(graph, value, kept - {value}, moved)
        if sources:
            sources_of[value] = sources
            kept.remove(value)
    return sources_of


def _sources(graph: Graph, value: Value, kept: Set[Value], moved: Set[tuple[Value, str]]) -> Set[Value] | None:
    """The values of ``kept`` that a value can be computed from, together with parameters and inputs; None if it needs
    anything else."""
    if value in kept:
        return {value}
    node = graph[value.node]
    if node.is_placeholder:
        return set()
    if node.phase == "backward" or is_heavy(node):
        return None
    kept_sources = set[Value]()
    for operand in node.operands:
        sources = None if (operand, node.name) in moved else _sources(graph, operand, kept, moved)
        if sources is None:
            return None
        kept_sources |= sources
    return kept_sources
