"""Marks the parameters whose gradients are computed of a scaled loss, which costs looking at each and dividing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import SCALED, Node
from autopar.passes.base import Pass


@dataclass(frozen=True)
class ScaledLoss(Pass):
    """Marks every parameter that has a gradient ``scaled`` (:attr:`autopar.ir.node.Node.is_scaled`). The numbers of the
    graph are those of the scaled loss all through; the runtime divides what comes out."""

    name: ClassVar[str] = "scaled-loss"

    def apply(self, graph: Graph) -> Graph:
        return with_scaled_loss(graph)


def with_scaled_loss(graph: Graph) -> Graph:
    """See :class:`ScaledLoss`."""

    def marked(node: Node) -> Node:
        learns = node.op == "param" and node.target in graph.gradients
        return replace(node, kwargs=(*node.kwargs, (SCALED, True))) if learns and not node.is_scaled else node

    return replace(graph, nodes=tuple(map(marked, graph.nodes)))
