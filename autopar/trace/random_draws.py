"""Numbers the random draws of a traced graph, and finds the dims that count samples."""

from __future__ import annotations

from dataclasses import replace

import sympy

from autopar.ir.graph import Graph
from autopar.ir.node import Dim, Node, Value, symbol
from autopar.ops.random import DRAWS, STATE_OP, position_strides

from .lengths import BATCH

STATE = "random"
"""The name, operation and target of the placeholder for the state of :mod:`autopar.ops.random`."""


def number_draws(graph: Graph) -> Graph:
    """The graph with every draw numbered in order (``place``), with the dim that counts samples (``samples``), and with
    the many mentions of the random state replaced by one placeholder in front.

    Draws are numbered before any node is merged or removed, so that the numbers do not depend on which part of the
    model runs.
    """
    mentions = [node for node in graph.nodes if node.op == STATE_OP]
    if not mentions:
        return graph
    state = Node(STATE, STATE, (STATE,), types=mentions[0].types)
    replacements = {Value(node.name): Value(STATE) for node in mentions}
    nodes, place = [state], 0
    for node in graph.nodes:
        if node.op == STATE_OP:
            continue
        node = node.map_values(lambda value: replacements.get(value, value))
        if node.op in DRAWS:
            node, place = _numbered(node, place), place + 1
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _numbered(node: Node, place: int) -> Node:
    samples = _samples(node.type.shape)
    attributes = (("place", place), *((("samples", samples),) if samples else ()))
    return replace(node, kwargs=(*node.kwargs, *attributes))


def _samples(shape: tuple[Dim, ...]) -> tuple[int, Dim] | None:
    """The dim of a symbolic shape that counts samples, or equally many rows of each, and the elements of a sample;
    None unless there is exactly one such dim."""
    batch = symbol(BATCH)
    dims = [dim for dim, size in enumerate(shape) if isinstance(size, sympy.Expr) and batch in size.free_symbols]
    if len(dims) != 1:
        return None
    rows = sympy.cancel(sympy.sympify(shape[dims[0]]) / batch)
    if not rows.is_integer or batch in rows.free_symbols:
        return None
    elements = rows * position_strides(shape, (dims[0], 0))[dims[0]]
    return dims[0], int(elements) if elements.is_Integer else elements
