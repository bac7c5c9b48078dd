"""Computes common subexpressions once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
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
        # The text of a form tells 1, 1.0 and True apart, and 0.0 from -0.0.
        first = seen.setdefault((node.form, node.operands, node.types), node)
        return node if first is node else Value(first.name)

    return with_phases(rewrite(graph, visit))
