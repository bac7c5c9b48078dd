"""Marks parameters whose gradients are those of a scaled loss, since checking and dividing each gradient has a cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import SCALED, Node
from autopar.passes.base import Pass


@dataclass(frozen=True)
class ScaledLoss(Pass):
    """Marks every parameter that has a gradient as ``scaled`` (:attr:`autopar.ir.node.Node.is_scaled`). The graph
    computes with the scaled loss throughout; the runtime divides the gradients at the end."""

    name: ClassVar[str] = "scaled-loss"

    def apply(self, graph: Graph) -> Graph:
        return with_scaled_loss(graph)


def with_scaled_loss(graph: Graph) -> Graph:
    """See :class:`ScaledLoss`."""

    def marked(node: Node) -> Node:
        learns = node.op == "param" and node.target in graph.gradients
        return replace(node, kwargs=(*node.kwargs, (SCALED, True))) if learns and not node.is_scaled else node

    return replace(graph, nodes=tuple(map(marked, graph.nodes)))
