"""Draws random numbers again in backward instead of saving them.

Compiled code draws inside of the kernel that uses the numbers, which takes less time than to write and read them. So
where backward reads a draw, or what elementwise operations make of draws alone, it computes a copy of its own:

    %m: b8[4, 4] = autopar.bernoulli.default(%random, ...)
    %k: f32[4, 4] = aten._to_copy.default(%m, ...)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %k)

becomes::

    %m: b8[4, 4] = autopar.bernoulli.default(%random, ...)
    %k: f32[4, 4] = aten._to_copy.default(%m, ...)
    backward %m_redrawn: b8[4, 4] = autopar.bernoulli.default(%random, ...)
    backward %k_redrawn: f32[4, 4] = aten._to_copy.default(%m_redrawn, ...)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %k_redrawn)

A draw is a function of its place, so that the copy equals its original bit by bit. A copy comes right before the first
operation of backward that needs it, and belongs to the module of its original.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ops.random_streams import STREAMED
from autopar.passes.base import Pass

from .backward_copies import is_step, with_copies

AGAIN = "_redrawn"
"""How the names of copies end."""
# Operations between a draw and what backward reads.
# Chosen: dropout has one or two, and longer chains would be cheaper to save.
_MOST_STEPS = 4


@dataclass(frozen=True)
class DrawAgain(Pass):
    """Backward draws again what it needs of random numbers; see the module docstring."""

    name: ClassVar[str] = "draw-again"

    def apply(self, graph: Graph) -> Graph:
        return draw_again(graph)


def draw_again(graph: Graph) -> Graph:
    """See :class:`DrawAgain`."""
    return with_copies(graph, _chains(graph), AGAIN)


def _chains(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """By forward node that is computed from draws alone: the operations that compute it, itself the last."""
    chains: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        if node.phase != "forward" or node.is_placeholder:
            continue
        if node.op in STREAMED:
            if graph[node.operands[0].node].op == "random":
                chains[node.name] = (node.name,)
        elif is_step(node) and node.operands and all(value.node in chains for value in node.operands):
            steps = dict.fromkeys(step for value in node.operands for step in chains[value.node])
            if len(steps) <= _MOST_STEPS:
                chains[node.name] = (*steps, node.name)
    return chains
