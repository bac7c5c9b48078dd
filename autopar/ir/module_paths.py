"""Module paths: folds the numbers of repeated layers, gives paths to nodes without, and suggests some for a misspelt
one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from .graph import Graph
from .node import Node


def fold_path(path: str, layers: Set[str] = frozenset()) -> tuple[str, tuple[int, ...]]:
    """A module path without its layer numbers, and those numbers: ``h.3.attn`` -> ``("h.*.attn", (3,))``.

    The number of a container's element counts if something follows it, or if the path is one of ``layers`` (see
    :func:`layers_among`): ``net.0``, a leaf, is not a layer.
    """
    parts = path.split(".")
    last = len(parts) if path in layers else len(parts) - 1
    numbers = tuple(int(part) for part in parts[:last] if part.isdigit())
    return ".".join("*" if p.isdigit() and i < last else p for i, p in enumerate(parts)), numbers


def layers_among(paths: Iterable[str]) -> frozenset[str]:
    """The elements of numbered containers that hold modules themselves: ``h.0`` if ``h.0.attn`` is there too."""
    layers: set[str] = set()
    for path in paths:
        parts = path.split(".")
        layers.update(".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if part.isdigit())
    return frozenset(layers)


def outermost_layer(path: str, layers: Set[str]) -> str:
    """The outermost of ``layers`` (:func:`layers_among`) that a module path is in, or is; "" if none."""
    parts = path.split(".")
    prefixes = (".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit())
    return next((prefix for prefix in prefixes if prefix in layers), "")


def block_of(path: str) -> str:
    """The outermost element of a numbered container that a module path is in: ``h.3`` of ``h.3.attn``; "" if none."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def did_you_mean(name: str, paths: Sequence[str]) -> str:
    """``; did you mean 'h.0.attn'?`` with up to four of the ``paths`` that resemble ``name``, or end with it because
    ``name`` leaves out the outer modules; "" if none do."""
    close = difflib.get_close_matches(name, paths, 4, 0.6)
    ends = [path for path in paths if name and path.endswith(f".{name}")][:4]
    suggestions = list(dict.fromkeys([*ends, *close]))[:4]
    return f"; did you mean {', '.join(map(repr, suggestions))}?" if suggestions else ""


def with_modules(graph: Graph, unplaced: set[str]) -> Graph:
    """Gives the ``unplaced`` nodes (torch has no path for sums of gradients) the module path of their latest producer,
    else that of a consumer.
    """
    if not unplaced:
        return graph
    paths = {node.name: node.module for node in graph.nodes if node.name not in unplaced}
    placeholders = {node.name for node in graph.nodes if node.is_placeholder}
    order = {node.name: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.name in paths:
            continue
        producers = [v.node for v in node.operands if v.node in paths and v.node not in placeholders]
        if producers:
            paths[node.name] = paths[max(producers, key=order.__getitem__)]
    for node in reversed(graph.nodes) if len(paths) < len(graph.nodes) else ():
        for value in node.operands:
            if node.name in paths:
                paths.setdefault(value.node, paths[node.name])

    def placed(node: Node) -> Node:
        path = paths.get(node.name, "")
        return node if node.module == path else node.inside(path)

    return replace(graph, nodes=tuple(map(placed, graph.nodes)))
