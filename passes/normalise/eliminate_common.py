"""Computes common subexpressions once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, Value, map_arg
from autopar.passes.base import Pass, is_pure, rewrite, with_phases


@dataclass(frozen=True)
class MergeCommon(Pass):
    """Merges pure operations with equal arguments. A node that forward and backward share is forward."""

    name: ClassVar[str] = "merge-common"

    def apply(self, graph: Graph) -> Graph:
        return merge_common(graph)


def merge_common(graph: Graph) -> Graph:
    """See :class:`MergeCommon`."""
    seen: dict[Any, Node] = {}

    def visit(node: Node) -> Node | Value:
        if not is_pure(node.op):
            return node
        first = seen.setdefault((node.op, _exact(node.args), _exact(node.kwargs), node.types), node)
        return node if first is node else Value(first.name)

    return with_phases(rewrite(graph, visit))


def _exact(arg: Arg) -> Arg:
    """``arg`` in a form that compares equal only for equal text: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    return map_arg(arg, lambda leaf: (type(leaf).__name__, repr(leaf)) if isinstance(leaf, (bool, float)) else leaf)
