"""Copies operations of forward into backward, before what reads them there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch

from autopar.ir.graph import Graph
from autopar.ir.node import CAST, VIEWS, Node, Value, fresh_name
from autopar.torch_internals.operators import OpOverload


def with_copies(graph: Graph, chains: Mapping[str, tuple[str, ...]], ending: str) -> Graph:
    """``graph``, whose backward reads copies of the results of ``chains``: by forward operation those that compute it,
    itself the last. A copy comes right before the first operation of backward that needs it; there is one of each. Its
    name is that of the original with the ``ending``."""
    if not chains:
        return graph
    names, nodes, copied = {node.name for node in graph.nodes}, list[Node](), dict[str, str]()

    def moved(value: Value) -> Value:
        return Value(copied[value.node], value.index) if value.node in copied else value

    for node in graph.nodes:
        if node.phase == "backward" and any(value.node in chains for value in node.operands):
            for value in node.operands:
                for original in chains.get(value.node, ()):
                    if original not in copied:
                        source = graph[original].map_values(moved)
                        copied[original] = fresh_name(f"{original}{ending}", names)
                        nodes.append(source.named(copied[original], "backward"))
            node = node.map_values(lambda value: moved(value) if value.node in chains else value)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def is_step(node: Node) -> bool:
    """Whether an operation computes each element from one element of each operand, or only views them."""
    return len(node.types) == 1 and (node.op == CAST or node.op in VIEWS or is_pointwise(node.op))


@cache
def is_pointwise(op: str) -> bool:
    """Whether torch says that an operation is elementwise."""
    name, _, overload = op.removeprefix("aten.").partition(".")
    operation = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return isinstance(operation, OpOverload) and torch.Tag.pointwise in operation.tags
