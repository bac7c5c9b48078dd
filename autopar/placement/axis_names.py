"""Names for the axes of a mesh, derived from what a plan does with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Partial

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.ir.placements import Placement, Strategy, is_shard, shard_before, shard_dim

# The least share of weights or activations in shards for which an axis is not called idle. Chosen: less are only
# exceptions, such as a vocabulary.
USED = 0.1


@dataclass(frozen=True, eq=False)
class _Computed:
    """An operation of forward and its strategy; ``reads``: which operands are weights."""

    node: Node
    strategy: Strategy
    reads: tuple[bool, ...]


def default_names(mesh: tuple[int, ...], assignment: Assignment, graph: Graph) -> tuple[str, ...]:
    """A name for each axis. ``tp`` if computations read most weights in shards along the axis. Otherwise by how most
    activations are placed: ``dp`` if sharded on dim 0, ``sp`` if sharded on another dim or an inner part of one. An
    axis along which most activations are replicated is named by the rest if that is more than :data:`USED` of the
    weights (``tp``) or of the activations (``tp`` if these are partial sums), and is ``idle`` otherwise. Equal names
    are numbered.
    """
    computed = _computed(assignment, graph, weight_values(graph))
    kinds = [_kind(graph, computed, axis) for axis in range(len(mesh))]
    return tuple(
        kind if kinds.count(kind) == 1 else f"{kind}{kinds[:axis].count(kind)}" for axis, kind in enumerate(kinds)
    )


def weight_values(graph: Graph) -> frozenset[str]:
    """The parameters, and the nodes that read only parameters: views and casts of weights."""
    return graph.once("values of weights", lambda: _weight_values(graph))


def _weight_values(graph: Graph) -> frozenset[str]:
    weights: set[str] = set()
    for node in graph.nodes:
        taken = {value.node for value in node.operands}
        if node.op == "param" or (taken and taken <= weights):
            weights.add(node.name)
    return frozenset(weights)


def _computed(assignment: Assignment, graph: Graph, weights: frozenset[str]) -> Counter[_Computed]:
    """How often forward computes something in one way."""
    classes, strategies, found = graph.classes, assignment.strategies, Counter[_Computed]()
    representatives: dict[Hashable, _Computed] = {}
    for node in graph.nodes:
        if node.phase == "forward" and not node.is_placeholder and node.name not in weights:
            strategy, reads = strategies[node.name], tuple([value.node in weights for value in node.operands])
            key = classes.get(node.name, node.name), id(strategy), reads  # Those of a class have the same types.
            if key not in representatives:
                representatives[key] = _Computed(node, strategy, reads)
            found[representatives[key]] += 1
    return found


def _kind(graph: Graph, computed: Mapping[_Computed, int], axis: int) -> str:
    sharded: Counter[bool] = Counter()
    roles: Counter[str] = Counter()
    for each, times in computed.items():
        for value, places, is_weight in zip(each.node.operands, each.strategy.inputs, each.reads, strict=True):
            if is_weight:
                sharded[is_shard(places[axis])] += int(graph.type_of(value).numel) * times
        for count, places in _results(each.node, each.strategy.outputs):
            roles[_role(places[axis])] += count * times
    if sharded[True] > sharded[False]:
        return "tp"
    role = max(("idle", "dp", "sp"), key=lambda role: roles[role])
    if role != "idle":
        return role
    if sharded[True] > USED * sharded.total():
        return "tp"
    divided = max(("dp", "sp"), key=lambda role: roles[role])
    if roles[divided] > USED * roles.total():
        return divided
    # Devices that have sums of other parts each share the work of the products before these.
    return "tp" if roles["partial"] > USED * roles.total() else "idle"


def _results(node: Node, outputs: tuple[tuple[Placement, ...], ...]) -> Iterator[tuple[int, tuple[Placement, ...]]]:
    for kind, places in zip(node.types, outputs, strict=True):
        if kind is not None and kind.rank > 1:
            yield int(kind.numel), places


def _role(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "partial"
    if not is_shard(placement):
        return "idle"
    return "dp" if shard_dim(placement) == 0 and shard_before(placement) == 1 else "sp"
