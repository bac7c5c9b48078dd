"""Lists, for every node of a concrete graph, the ways to run it on a mesh (``graph.strategies``).

One-axis strategies come from, in this order: our rules; DTensor's rules as far as they hold when executed; for an operation with
neither, replication alone, which the plan reports as a fallback with its price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import ClassVar

from autopar.graph import Graph, Node, TensorType
from autopar.spec import (
    PARTIAL_SUM,
    REPLICATE,
    AxisStrategy,
    Placements,
    Shard,
    StridedShard,
    Strategy,
    is_valid,
)

from .base import Pass
from .compose import compose, op_call, shardable
from .dimension_strings import strided_variants
from .rest import REST
from .rule_table import RULES
from .rules import OpCall
from .rules_dtensor import proven_strategies

Factors = Mapping[int, frozenset[int]]
RESHAPE = "aten.reshape.default"
REPLICATED_PLACEHOLDERS = ("buffer", "constant", "tangent")


@dataclass(frozen=True)
class Annotate(Pass):
    """Fills ``graph.strategies`` for a mesh; see the module docstring."""

    name: ClassVar[str] = "annotate"
    mesh: tuple[int, ...]

    def apply(self, graph: Graph) -> Graph:
        return annotate(graph, self.mesh)


def axis_strategies(call: OpCall, factors: Factors) -> tuple[AxisStrategy, ...]:
    """The strategies of one axis but the replicated one, strided variants for the given ``factors`` included."""
    if call.op == REST:
        return ()
    found = tuple(RULES[call.op](call)) if call.op in RULES else proven_strategies(call)
    variants = [v for strategy in found for v in strided_variants(call, strategy, factors)]
    return tuple(dict.fromkeys([*found, *variants]))


def is_fallback(node: Node) -> bool:
    """Whether the node can only be replicated because nobody has a rule for its operation."""
    return not node.is_placeholder and node.op != REST and node.op not in RULES


def reshape_factors(graph: Graph, mesh: tuple[int, ...]) -> Factors:
    """For each dim size the factors behind which some reshape of the graph can leave a shard: the strided shards that matter."""
    factors: defaultdict[int, set[int]] = defaultdict(set)

    def offer(call: OpCall) -> tuple[AxisStrategy, ...]:
        found = tuple(RULES[call.op](call))
        for strategy in found:
            for tensor, placement in (
                *zip(call.inputs, strategy.inputs, strict=True),
                *zip(call.outputs, strategy.outputs, strict=True),
            ):
                if tensor is not None and isinstance(placement, StridedShard):
                    factors[int(tensor.shape[placement.dim])].add(placement.before)
        return found

    for call in {op_call(graph, node) for node in graph.nodes if node.op in FACTORING}:
        compose(call, mesh, offer)
    return {size: frozenset(befores) for size, befores in factors.items()}


FACTORING = (RESHAPE, "aten.split.Tensor", "aten.split_with_sizes.default", "aten.cat.default")


def annotate(graph: Graph, mesh: tuple[int, ...]) -> Graph:
    """The graph with ``strategies`` for a mesh of that shape."""
    offer = partial(axis_strategies, factors=reshape_factors(graph, mesh))
    known: dict[OpCall, tuple[Strategy, ...]] = {}
    strategies: dict[str, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node.is_placeholder:
            strategies[node.name] = placeholder_strategies(node, mesh)
        elif node.op != REST:
            call = op_call(graph, node)
            if call not in known:
                known[call] = compose(call, mesh, offer)
            strategies[node.name] = known[call]
    for node in graph.nodes:
        if node.op == REST:
            strategies[node.name] = _rest_strategies(graph, node, strategies)
    return replace(graph, strategies=strategies)


def placeholder_strategies(node: Node, mesh: tuple[int, ...]) -> tuple[Strategy, ...]:
    """Where a placeholder can lie at the start of a step; a parameter wherever it can be stored and gathered from."""
    if node.op in REPLICATED_PLACEHOLDERS:
        return (Strategy((), ((REPLICATE,) * len(mesh),)),)
    empty = node.op == "param"
    return tuple(Strategy((), (p,)) for p in plain_placements(node.type, mesh, empty_shards=empty))


def plain_placements(kind: TensorType, mesh: tuple[int, ...], *, empty_shards: bool = False) -> list[Placements]:
    """Every placement of Replicate and plain Shard, on axes of more than one device; shards that leave a device nothing only if
    ``empty_shards``."""
    shape = tuple(int(size) for size in kind.shape)
    per_axis = [[REPLICATE, *(Shard(d) for d in range(len(shape)))] if n > 1 else [REPLICATE] for n in mesh]
    found = [tuple(choice) for choice in product(*per_axis) if is_valid(tuple(choice), shape, mesh)]
    return [p for p in found if empty_shards or shardable(shape, p, mesh)]


def _rest_strategies(graph: Graph, node: Node, known: Mapping[str, tuple[Strategy, ...]]) -> tuple[Strategy, ...]:
    """A value may rest in any placement its producer leaves it in or one of its users takes it in."""
    (value,) = node.operands
    places = dict.fromkeys(s.outputs[value.index] for s in known[value.node])
    for user, operand in graph.users.get(type(value)(node.name), ()):
        if user.op != REST:
            places.update(dict.fromkeys(s.inputs[operand] for s in known[user.name]))
    return tuple(Strategy((p,), (p,)) for p in places if all(q == PARTIAL_SUM or "P(" not in str(q) for q in p))
