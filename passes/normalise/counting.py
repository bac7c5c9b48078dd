"""Finds integer tensors that count the positions of one of their dims: ``arange`` and its views."""

from __future__ import annotations

import torch

from autopar.ir.graph import Graph
from autopar.ir.node import CAST, Arg, Dim, Node, TensorType, Value

# A count of positions fits into these.
INTEGERS = (torch.int64, torch.int32)


def counted_dim(graph: Graph, value: Value) -> int | None:
    """The dim of ``value`` along which it is 0, 1, 2, ... (the same for any position in its other dims); None if there
    is none, or it has one element."""
    node, kind = graph[value.node], graph.type_of(value)
    if kind.dtype not in INTEGERS:
        return None
    if node.op.startswith("aten.arange."):
        return 0 if _counts_from_zero(node) and _is_several(kind.shape[0]) else None
    if node.op not in _FOLLOWED or not node.operands:
        return None
    operand = node.operands[0]
    dim = counted_dim(graph, operand)
    return None if dim is None else _FOLLOWED[node.op](node, graph.type_of(operand), dim)


def _is_several(size: Dim) -> bool:
    """Whether a size is 2 or more, as symbolic ones are."""
    return not isinstance(size, int) or size > 1


def _counts_from_zero(node: Node) -> bool:
    options = dict(node.kwargs)
    start: Arg = 0
    if node.op != "aten.arange.default":
        start = node.args[0] if node.args else options.get("start")
    step: Arg = node.args[2] if len(node.args) > 2 else options.get("step", 1)
    return (type(start), start) == (int, 0) and (type(step), step) == (int, 1)


def _through_reshape(node: Node, before: TensorType, dim: int) -> int | None:
    """Of reshapes, those that add or remove dims of one element are followed."""
    old = [d for d, size in enumerate(before.shape) if size != 1]
    new = [d for d, size in enumerate(node.type.shape) if size != 1]
    same = [before.shape[d] for d in old] == [node.type.shape[d] for d in new]
    return new[old.index(dim)] if same else None


def _through_expand(node: Node, before: TensorType, dim: int) -> int | None:
    return dim + node.type.rank - before.rank


def _through_permute(node: Node, before: TensorType, dim: int) -> int | None:
    return tuple(order % before.rank for order in node.args[1]).index(dim)


def _through_cast(node: Node, before: TensorType, dim: int) -> int | None:
    return dim


_FOLLOWED = {
    "aten.reshape.default": _through_reshape,
    "aten.expand.default": _through_expand,
    "aten.permute.default": _through_permute,
    CAST: _through_cast,
}
