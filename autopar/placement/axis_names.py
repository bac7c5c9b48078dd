"""Names for the axes of a mesh by what a plan does with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.ir.placements import Placement, is_shard, shard_before, shard_dim


def default_names(mesh: tuple[int, ...], assignment: Assignment, graph: Graph) -> tuple[str, ...]:
    """``tp`` for an axis that most of the weights are computed with in shards; else by how most of the activations
    lie: ``dp`` on their dim 0, ``sp`` on another or an inner part of one, ``idle`` whole; numbered where several axes
    do the same.
    """
    weights = weight_values(graph)
    kinds = [_kind(assignment, graph, weights, axis) for axis in range(len(mesh))]
    return tuple(
        kind if kinds.count(kind) == 1 else f"{kind}{kinds[:axis].count(kind)}" for axis, kind in enumerate(kinds)
    )


def weight_values(graph: Graph) -> frozenset[str]:
    """Parameters, and the nodes that take nothing else: views and casts of weights."""
    found: set[str] = set()
    for node in graph.nodes:
        taken = {value.node for value in node.operands}
        if node.op == "param" or (taken and taken <= found):
            found.add(node.name)
    return frozenset(found)


def _kind(assignment: Assignment, graph: Graph, weights: frozenset[str], axis: int) -> str:
    used: Counter[bool] = Counter()
    lies: Counter[str] = Counter()
    for node in graph.nodes:
        if node.phase == "forward" and not node.is_placeholder and node.name not in weights:
            strategy = assignment.strategies[node.name]
            for value, places in zip(node.operands, strategy.inputs, strict=True):
                if value.node in weights:
                    used[is_shard(places[axis])] += int(graph.type_of(value).numel)
            for count, places in _results(node, strategy.outputs):
                lies[_role(places[axis])] += count
    if used[True] > used[False]:
        return "tp"
    return max(("idle", "dp", "sp"), key=lambda role: lies[role])


def _results(node: Node, outputs: tuple[tuple[Placement, ...], ...]) -> Iterator[tuple[int, tuple[Placement, ...]]]:
    for kind, places in zip(node.types, outputs, strict=True):
        if kind is not None and kind.rank > 1:
            yield int(kind.numel), places


def _role(placement: Placement) -> str:
    if not is_shard(placement):
        return "idle"
    return "dp" if shard_dim(placement) == 0 and shard_before(placement) == 1 else "sp"
