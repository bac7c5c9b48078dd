"""Writes each change of shape in one way: ``reshape``, ``permute``, ``expand``, ``slice``, with nothing implicit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Dim, Node, Value
from autopar.passes.base import LAYOUT_SENSITIVE, Pass, rewrite
from autopar.passes.rules.view import RESHAPES

RESHAPE, PERMUTE, EXPAND = "aten.reshape.default", "aten.permute.default", "aten.expand.default"

_PERMUTES = frozenset(f"aten.{name}" for name in ("t.default", "transpose.int", "permute.default"))
_EXPANDS = frozenset(f"aten.{name}" for name in ("expand.default", "expand_copy.default"))
_SILENT = frozenset(("pin_memory", "layout", "memory_format", "non_blocking", "implicit"))
# Traces write an open end as the largest 64-bit integer; no dim comes near this.
_END = 1 << 62


@dataclass(frozen=True)
class CanonicalViews(Pass):
    """Example::

        %x: f32[b, 4] = aten.view.default(%a, [-1, 4])   becomes   aten.reshape.default(%a, [b, 4])
        %y: f32[4, b] = aten.t.default(%x)               becomes   aten.permute.default(%x, [1, 0])

    ``view``, ``_unsafe_view``, ``squeeze``, ``unsqueeze``, ``flatten`` become ``reshape`` (which, unlike
    ``view``, also takes the transposed tensors that sharding leaves), with the full target shape; ``t`` and
    ``transpose`` become ``permute``; ``expand`` and ``slice`` say every size. A chain of the same kind
    becomes one step. Arguments about memory layout, which has no meaning in a graph, are dropped, unless an
    operation of the graph reads the layout.
    """

    name: ClassVar[str] = "canonical-views"

    def apply(self, graph: Graph) -> Graph:
        return canonical_views(graph)


def canonical_views(graph: Graph) -> Graph:
    """See :class:`CanonicalViews`."""
    latest: dict[str, Node] = {}
    silent = _SILENT - {"memory_format"} if any(n.op in LAYOUT_SENSITIVE for n in graph.nodes) else _SILENT

    def visit(node: Node) -> Node:
        canonical = _composed(_canonical(_without(node, silent), graph), latest)
        latest[node.name] = canonical
        return canonical

    return rewrite(graph, visit)


def _without(node: Node, silent: frozenset[str]) -> Node:
    if not any(key in silent for key, _ in node.kwargs):
        return node
    return replace(node, kwargs=tuple((key, arg) for key, arg in node.kwargs if key not in silent))


def _canonical(node: Node, graph: Graph) -> Node:
    if node.op in RESHAPES:
        return replace(node, op=RESHAPE, args=(node.args[0], node.type.shape), kwargs=())
    if node.op in _PERMUTES:
        return replace(node, op=PERMUTE, args=(node.args[0], _order(node, graph)), kwargs=())
    if node.op in _EXPANDS:
        return replace(node, op=EXPAND, args=(node.args[0], node.type.shape), kwargs=())
    if node.op == "aten.slice.Tensor":
        return replace(node, args=_slice_args(node, graph), kwargs=())
    return node


def _order(node: Node, graph: Graph) -> tuple[int, ...]:
    rank = graph.type_of(node.args[0]).rank
    if node.op == PERMUTE:
        return tuple(dim % rank for dim in node.args[1])
    order = list(range(rank))
    if rank and (node.op == "aten.transpose.int" or rank == 2):
        first, second = node.args[1:3] if node.op == "aten.transpose.int" else (0, 1)
        order[first], order[second] = order[second], order[first]
    return tuple(order)


def _slice_args(node: Node, graph: Graph) -> tuple[Arg, ...]:
    """``(x, dim, start, end, step)`` with bounds inside the dim where they can be compared."""
    positional = dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False))
    value, options = (
        node.args[0],
        {"dim": 0, "start": None, "end": None, "step": 1, **positional, **dict(node.kwargs)},
    )
    shape = graph.type_of(value).shape
    dim = options["dim"] % len(shape)
    start, end = options["start"], options["end"]
    start = 0 if start is None else _bound(start, shape[dim])
    end = shape[dim] if end is None or (isinstance(end, int) and end >= _END) else _bound(end, shape[dim])
    return value, dim, start, end, options["step"]


def _bound(position: Dim, size: Dim) -> Dim:
    if isinstance(position, int) and position < 0:
        position = position + size
    if isinstance(position, int) and isinstance(size, int):
        return max(0, min(position, size))
    return position


def _composed(node: Node, latest: dict[str, Node]) -> Node:
    """``node`` composed with its producer if that is of the same kind."""
    producer = latest.get(node.args[0].node) if node.args and isinstance(node.args[0], Value) else None
    if producer is None or producer.op != node.op or node.op not in _COMPOSE:
        return node
    return replace(node, args=(producer.args[0], _COMPOSE[node.op](node.args[1], producer.args[1])))


def _compose_orders(second: tuple[int, ...], first: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(first[dim] for dim in second)


_COMPOSE: dict[str, Callable[[Arg, Arg], Arg]] = {
    RESHAPE: lambda second, first: second,
    EXPAND: lambda second, first: second,
    PERMUTE: _compose_orders,
}
