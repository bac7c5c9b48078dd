"""Makes casts of parameters to fewer bits part of the parameters: they run once a step, before communication.

Under mixed precision a product reads ``bf16`` copies of ``f32`` parameters. As an operation of the graph, such a cast
would run for every microbatch, and the copy would be one of many values. As part of the parameter it runs when a step
begins, on the shard that the optimizer updates. Gathers of the weight then move half the bytes, and the placement of
the copy is a choice of the parameter: replicated for a step (ZeRO-1 and 2), or sharded (ZeRO-3).

::

    %w: f32[4, 4] = param("w")                          %w: bf16[4, 4] = param("w", stored=torch.float32)
    %half: bf16[4, 4] = aten._to_copy.default(%w, dtype=torch.bfloat16)    ->
    %y: bf16[b, 4] = aten.mm.default(%x, %half)         %y: bf16[b, 4] = aten.mm.default(%x, %w)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import CAST, STORED, Node, Value
from autopar.passes.base import Pass, rewrite


@dataclass(frozen=True)
class CastOnce(Pass):
    """Gives a parameter of which only copies of fewer bits are read the type of these copies, and records the dtype it
    is stored in. A parameter that is also read uncast (a table that is looked up and also multiplied) keeps its casts
    as operations."""

    name: ClassVar[str] = "cast-once"

    def apply(self, graph: Graph) -> Graph:
        return cast_once(graph)


def cast_once(graph: Graph) -> Graph:
    """See :class:`CastOnce`."""
    read = {value.node for node in graph.nodes if node.op == CAST for value in node.operands}
    casts = {node.name: _only_cast(graph, node) for node in graph.placeholders("param") if node.name in read}
    working = {name: cast for name, cast in casts.items() if cast is not None}
    if not working:
        return graph

    def visit(node: Node) -> Node | Value:
        return node.operands[0] if node.op == CAST and node.operands[0].node in working else node

    uncast = rewrite(graph, visit)
    nodes = tuple(
        _with_stored_dtype(node, working[node.name]) if node.name in working else node for node in uncast.nodes
    )
    return replace(uncast, nodes=nodes)


def _only_cast(graph: Graph, parameter: Node) -> Node | None:
    """A cast of ``parameter`` if all its uses are casts to the same smaller dtype."""
    value = Value(parameter.name)
    users = [user for user, _ in graph.users.get(value, ())]
    if not users or value in graph.output_values or dict(parameter.kwargs).get(STORED) is not None:
        return None
    first = users[0]
    alike = all(user.op == CAST and user.type == first.type for user in users)
    narrow = alike and first.type.dtype.itemsize < parameter.type.dtype.itemsize
    return first if narrow and parameter.type.dtype.is_floating_point and first.type.dtype.is_floating_point else None


def _with_stored_dtype(parameter: Node, cast: Node) -> Node:
    return replace(parameter, types=cast.types, kwargs=(*parameter.kwargs, (STORED, parameter.type.dtype)))
