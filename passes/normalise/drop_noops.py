"""Drops operations whose result is one of their operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, Value
from autopar.passes.base import LAYOUT_SENSITIVE, Pass, rewrite

_COPIES = frozenset(("aten.clone.default", "aten.contiguous.default", "aten.lift_fresh_copy.default"))
_IDENTITIES = frozenset(
    ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default", "aten.detach_copy.default")
)
_IF_SAME_TYPE = frozenset(
    f"aten.{name}"
    for name in (
        "reshape.default",
        "view.default",
        "_unsafe_view.default",
        "expand.default",
        "slice.Tensor",
        "slice_backward.default",
        "_to_copy.default",
        "repeat.default",
        "squeeze.dims",
    )
)
_NEUTRAL = {
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar"), 0),
    **dict.fromkeys(
        (
            "aten.mul.Tensor",
            "aten.mul.Scalar",
            "aten.div.Tensor",
            "aten.div.Scalar",
            "aten.pow.Tensor_Scalar",
        ),
        1,
    ),
}


@dataclass(frozen=True)
class DropNoops(Pass):
    """Drops copies, views and casts that change nothing, sums with the number 0, products with 1, conjunctions with
    True, and empty or single operands of ``cat``. Leaves operations that draw random numbers alone."""

    name: ClassVar[str] = "drop-noops"

    def apply(self, graph: Graph) -> Graph:
        return drop_noops(graph)


def drop_noops(graph: Graph) -> Graph:
    """See :class:`DropNoops`."""
    keep_copies = any(node.op in LAYOUT_SENSITIVE for node in graph.nodes)

    def visit(node: Node) -> Node | Value:
        if node.op in _IDENTITIES or (node.op in _COPIES and not keep_copies):
            return _first(node)
        if node.op == "aten.cat.default":
            return _without_empty(node, graph)
        if len(node.types) == 1 and node.operands and _SHAPES.get(node.op, _never)(node, graph):
            return _surviving_operand(node, graph)
        return node

    return rewrite(graph, visit)


def _first(node: Node) -> Value:
    return node.operands[0]


def _surviving_operand(node: Node, graph: Graph) -> Value:
    """The operand that equals the result: the first, or for a conjunction the one that is not the constant."""
    if node.op in _CONJUNCTIONS and _is_true(node.args[0], graph):
        value: Value = node.args[1]
        return value
    return _first(node)


def _never(node: Node, graph: Graph) -> bool:
    return False


def _same_type(node: Node, graph: Graph) -> bool:
    return graph.type_of(_first(node)) == node.type


def _adds_nothing(node: Node, graph: Graph) -> bool:
    if len(node.args) < 2 or not isinstance(node.args[0], Value):
        return False
    is_number = isinstance(node.args[1], (int, float)) and not isinstance(node.args[1], bool)
    return is_number and node.args[1] == _NEUTRAL[node.op] and _same_type(node, graph)


def _pads_nothing(node: Node, graph: Graph) -> bool:
    """Whether all padding is 0. Equal types are not enough: a dim padded at one end and cropped at the other is
    shifted."""
    return all(amount == 0 for amount in node.args[1]) and _same_type(node, graph)


def _keeps_order(node: Node, graph: Graph) -> bool:
    return tuple(node.args[1]) == tuple(range(node.type.rank))


def _is_true(arg: Arg, graph: Graph) -> bool:
    producer = graph[arg.node] if isinstance(arg, Value) else None
    return producer is not None and producer.op == "aten.full.default" and bool(producer.args[1]) is True


def _conjoins_true(node: Node, graph: Graph) -> bool:
    """Whether one side is a constant True, and the other has the type of the result."""
    sides = node.args[:2]
    if not all(isinstance(side, Value) for side in sides) or node.type.dtype != torch.bool:
        return False
    return any(_is_true(sides[i], graph) and graph.type_of(sides[1 - i]) == node.type for i in (0, 1))


_CONJUNCTIONS = frozenset(("aten.bitwise_and.Tensor", "aten.logical_and.default"))
_SHAPES: dict[str, Callable[[Node, Graph], bool]] = {
    **dict.fromkeys(_IF_SAME_TYPE, _same_type),
    **dict.fromkeys(_NEUTRAL, _adds_nothing),
    **dict.fromkeys(_CONJUNCTIONS, _conjoins_true),
    "aten.constant_pad_nd.default": _pads_nothing,
    "aten.permute.default": _keeps_order,
}


def _without_empty(node: Node, graph: Graph) -> Node | Value:
    """``cat`` without empty operands; torch allows empty tensors of shape [0] next to any."""
    tensors = tuple(value for value in node.args[0] if graph.type_of(value).numel != 0)
    if len(tensors) == 1 and graph.type_of(tensors[0]) == node.type:
        value: Value = tensors[0]
        return value
    if not tensors or len(tensors) == len(node.args[0]):
        return node
    if reduce(torch.promote_types, (graph.type_of(value).dtype for value in tensors)) != node.type.dtype:
        return node
    return replace(node, args=(tensors, *node.args[1:]))
