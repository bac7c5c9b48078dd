"""Ties repeated layers: equivalent nodes of equal layers form one class, and all nodes of a class choose alike.

A layer is an element of a numbered container (``h.0``, ``layers.11``) that contains modules itself. Two nodes are
equivalent if they have the same module path without layer numbers, phase, operation, arguments and types, and the same
position among the nodes of their layer that share all these; parameters, if both get a gradient or neither does.
``groups`` > 1 divides the depth into so many equal stretches and ties only layers of the same stretch: under a memory
limit equal layers may do better by choosing differently. Steps of loops inside a layer are tied as well, in as many
stretches (:mod:`.fold_loops`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType

from autopar.ir.graph import Graph
from autopar.ir.module_paths import fold_path, layers_among

from .equivalent_nodes import EquivalenceKeys
from .fold_loops import fold_loops

NOBODY: Mapping[str, Hashable] = MappingProxyType({})


def fold_layers(graph: Graph, groups: int = 1, apart: Mapping[str, Hashable] = NOBODY) -> Graph:
    """The graph with ``classes``, which maps each node's name to that of the first node of its class. Nodes named in
    ``apart`` are tied only to nodes with the same entry there: those that the user pinned alike."""
    keys, paths = EquivalenceKeys(graph), [node.path for node in graph.nodes]
    distinct = dict.fromkeys(paths)
    layers = layers_among(distinct)
    folded = {path: fold_path(path, layers) for path in distinct}
    depths: dict[str, int] = {}
    for pattern, numbers in folded.values():
        if numbers:
            stem = pattern.partition("*")[0]
            depths[stem] = max(depths.get(stem, 0), numbers[0] + 1)
    seen, classes, representative = dict[Hashable, int](), dict[str, str](), dict[Hashable, str]()
    for node, path in zip(graph.nodes, paths, strict=True):
        pattern, numbers = folded[path]
        if not numbers:
            classes[node.name] = node.name
            continue
        stretch = numbers[0] * groups // depths[pattern.partition("*")[0]] if groups > 1 else 0
        part = keys.of(node, pattern)
        place = seen[part, numbers] = seen.get((part, numbers), 0) + 1
        key = part, stretch, place, apart.get(node.name)
        classes[node.name] = representative.setdefault(key, node.name)
    return graph.annotated(classes=fold_loops(graph, classes, apart, groups))
