"""Ties repeated layers: nodes that play the same part in equal layers are put into one class and choose alike.

A layer is an element of a numbered container (``h.0``, ``layers.11``) that holds modules itself; the part a node plays is its
module path with layer numbers left out, its phase, operation, arguments, types and its position among the nodes of its layer that
share all these. ``groups`` > 1 ties only layers of the same stretch of depth (of ``groups`` equal stretches): under a memory limit
equal layers may do better by choosing differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.graph import Arg, Graph, Node, Value, map_arg
from autopar.paths import fold_path

from .base import Pass


@dataclass(frozen=True)
class FoldLayers(Pass):
    """Fills ``graph.classes``; see the module docstring."""

    name: ClassVar[str] = "fold-layers"
    groups: int = 1

    def apply(self, graph: Graph) -> Graph:
        return fold_layers(graph, self.groups)


def _part(node: Node, operand_types: tuple[Hashable, ...]) -> Hashable:
    """What must be equal for two nodes to have the same strategies at the same prices, but for the layer."""
    path = node.target if node.is_placeholder else node.module

    def leaf(arg: Arg) -> Arg:
        return None if isinstance(arg, Value) else repr(arg)

    args = () if node.is_placeholder else (map_arg(node.args, leaf), map_arg(node.kwargs, leaf))
    return fold_path(path)[0], node.phase, node.op, args, operand_types, node.types


def _depths(graph: Graph) -> dict[str, int]:
    """How many layers each numbered container has, by its path pattern up to the first number."""
    depths: dict[str, int] = {}
    for node in graph.nodes:
        path = node.target if node.is_placeholder else node.module
        pattern, numbers = fold_path(path)
        if numbers:
            stem = pattern.partition("*")[0]
            depths[stem] = max(depths.get(stem, 0), numbers[0] + 1)
    return depths


def fold_layers(graph: Graph, groups: int = 1) -> Graph:
    """The graph with ``classes`` mapping each node's name to that of the first node of its class."""
    depths, seen, classes = _depths(graph), Counter[Hashable](), {}
    representative: dict[Hashable, str] = {}
    for node in graph.nodes:
        pattern, numbers = fold_path(node.target if node.is_placeholder else node.module)
        stretch = numbers[0] * groups // depths[pattern.partition("*")[0]] if numbers else 0
        part = _part(node, tuple(graph.type_of(value) for value in node.operands))
        seen[part, numbers] += 1
        key = (part, stretch, seen[part, numbers]) if numbers else node.name
        classes[node.name] = representative.setdefault(key, node.name)
    return replace(graph, classes=classes)
