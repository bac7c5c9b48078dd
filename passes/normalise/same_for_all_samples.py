"""Which values of a graph without inputs are the same for every sample, and for every size of the batch.

A value counts as such if it is computed by operations that give equal rows for equal rows: its only symbolic size is
the batch, which is dim 0, and nothing computes with that size or along that dim. Rows that are picked by the position
of their own sample, ``x[arange(b), i]``, are those of ``x``.
"""

from __future__ import annotations

import sympy
import torch

from autopar.ir.graph import Graph
from autopar.ir.node import CAST, Arg, Node, TensorType, Value, has_expression
from autopar.torch_internals.operators import operation_called

# The size of the result is an argument, and may name the batch.
_SIZED = frozenset(f"aten.{name}.default" for name in ("expand", "reshape", "full", "zeros", "ones"))
# Operations along one dim, by the position of that dim among their arguments.
_ALONG = {"aten.slice.Tensor": 1, "aten.cat.default": 1, "aten.cumsum.default": 1}
_INDEX = "aten.index.Tensor"


def same_for_all_samples(graph: Graph, value: Value) -> bool:
    """Whether ``value``, whose ``graph`` has what it is computed from and no inputs, is. See the module."""
    same: set[str] = set()
    counts: set[str] = set()
    for node in graph.nodes:
        kinds = [kind for kind in node.types if kind is not None]
        if not all(map(_has_batch_first, kinds)):
            return False
        if _counts_samples(node, counts):
            counts.add(node.name)
        elif _keeps(graph, node, same, counts):
            same.add(node.name)
        else:
            return False
    return value.node in same


def _has_batch_first(kind: TensorType) -> bool:
    """Whether no size but the first is symbolic, and that is the size of the batch, or a number."""
    first, rest = kind.shape[:1], kind.shape[1:]
    return all(isinstance(size, (int, sympy.Symbol)) for size in first) and not has_expression(rest)


def _is_batched(kind: TensorType) -> bool:
    return has_expression(kind.shape)


def _counts_samples(node: Node, counts: set[str]) -> bool:
    """Whether the node gives 0, 1, 2, ... for the samples."""
    if node.op == "aten.arange.default":
        return has_expression(node.args)
    views = node.op in ("aten.reshape.default", CAST) and len(node.operands) == 1
    return views and node.operands[0].node in counts and all(size == 1 for size in node.type.shape[1:])


def _keeps(graph: Graph, node: Node, same: set[str], counts: set[str]) -> bool:
    """Whether the node gives equal rows for equal rows."""
    if node.op == _INDEX:
        return _picks_own_rows(graph, node, same, counts)
    if not all(operand.node in same for operand in node.operands):
        return False
    if not node.is_symbolic and not any(_is_batched(graph.type_of(operand)) for operand in node.operands):
        return True
    if node.op in _SIZED:
        return _keeps_batch(graph, node)
    if has_expression(node.args) or any(has_expression(arg) for _, arg in node.kwargs):
        return False
    if node.op in _ALONG:
        return _along(node) != 0
    operation = operation_called(node.op)
    return node.op == CAST or (operation is not None and torch.Tag.pointwise in operation.tags)


def _keeps_batch(graph: Graph, node: Node) -> bool:
    """Whether a reshape leaves the batch a dim of its own; the others cannot do otherwise."""
    operands = [graph.type_of(operand) for operand in node.operands]
    return node.op != "aten.reshape.default" or _is_batched(operands[0]) == _is_batched(node.type)


def _along(node: Node) -> int:
    place = _ALONG[node.op]
    dim: Arg = node.args[place] if len(node.args) > place else dict(node.kwargs).get("dim", 0)
    return int(dim) % node.type.rank


def _picks_own_rows(graph: Graph, node: Node, same: set[str], counts: set[str]) -> bool:
    table, indices = node.args[0], node.args[1]
    if table.node not in same or any(not isinstance(index, Value) for index in indices):
        return False
    first, *rest = indices
    kinds = [graph.type_of(index) for index in rest]
    others = all(index.node in same for index in rest) and not any(map(_is_batched, kinds))
    if not _is_batched(graph.type_of(table)):
        return others and first.node in same and not _is_batched(graph.type_of(first))
    return others and first.node in counts
