"""Lists, for every node of a concrete graph, the ways to run it on a mesh (``graph.strategies``).

One-axis strategies come from our rules, else from what is found out by execution
(:mod:`autopar.passes.probe.found_rules`); where that is nothing, there is replication alone, which the plan reports
as a fallback with its price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

from torch.distributed.tensor import Partial, Shard

from autopar.errors import OperatorError
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, TensorType, Value
from autopar.ir.placements import (
    PARTIAL_SUM,
    REPLICATE,
    AxisStrategy,
    Placement,
    Placements,
    Strategy,
    StridedShard,
    is_shard,
    is_valid,
    shard_dim,
)
from autopar.passes.probe.found_rules import found_strategies, refuted, source
from autopar.passes.rule_language.compose import compose, op_call, shardable
from autopar.passes.rule_language.dimension_strings import strided_variants
from autopar.passes.rule_language.registry import OpCall
from autopar.passes.rules import RULES

from .equivalent_nodes import without_positions
from .prune import Live, is_live, live_placements

Factors = Mapping[int, frozenset[int]]
RESHAPE = "aten.reshape.default"
REPLICATED_PLACEHOLDERS = ("buffer", "constant", "tangent", "random")


def axis_strategies(call: OpCall, factors: Factors) -> tuple[AxisStrategy, ...]:
    """The strategies of one axis but the replicated one, strided variants for the given ``factors`` included."""
    if call.op == SAVED_ACTIVATION:
        return ()
    found = tuple(RULES[call.op](call)) if call.op in RULES else found_strategies(call)
    variants = [v for strategy in found for v in strided_variants(call, strategy, factors)]
    return tuple(dict.fromkeys([*found, *variants]))


def needs_finding(graph: Graph) -> bool:
    """Whether the graph has operations without a written rule."""
    return any(not _has_rule(node) for node in graph.nodes)


def rule_sources(graph: Graph, mesh: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    """Where the rules of each operation come from: ``written``, what :func:`autopar.passes.probe.found_rules.source`
    says of its calls (``fallback: ...`` if nothing is known), and ``refuted: ...`` for what was registered and is not
    true."""
    found: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        if not node.is_placeholder and node.op != SAVED_ACTIVATION:
            found.setdefault(node.op, {}).update(dict.fromkeys(_sources(graph, node, mesh)))
    return {op: tuple(said) for op, said in found.items()}


def _sources(graph: Graph, node: Node, mesh: tuple[int, ...]) -> list[str]:
    if node.op in RULES:
        return ["written"]
    sizes = sorted({n for n in mesh if n > 1})
    if not sizes:
        return ["none needed on one device"]
    calls = [op_call(graph, node, size) for size in sizes]
    lies = [f"refuted: {lie}" for call in calls for lie in refuted(call)]
    said = [source(call) for call in calls]
    # One axis that can be divided is enough.
    return [*([s for s in said if not s.startswith("fallback")] or said)[:1], *lies]


def rule_findings(graph: Graph, size: int) -> list[tuple[str, str, str]]:
    """For each kind of call without a written rule on an axis of ``size`` devices: the call, where its rule comes from,
    and its strategies."""
    calls = {op_call(graph, n, size): None for n in graph.nodes if not _has_rule(n)}
    return [(repr(call), source(call), ", ".join(map(str, found_strategies(call)))) for call in calls]


def _has_rule(node: Node) -> bool:
    return node.is_placeholder or node.op == SAVED_ACTIVATION or node.op in RULES


def reshape_factors(graph: Graph, mesh: tuple[int, ...]) -> Factors:
    """For each dim size the factors behind which some reshape of the graph can leave a shard: the strided shards that
    matter."""
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

    for call in {op_call(graph, node) for node in graph.nodes if node.op in FACTORING and node.op in RULES}:
        compose(call, mesh, offer)
    return {size: frozenset(befores) for size, befores in factors.items()}


FACTORING = (RESHAPE, "aten.split.Tensor", "aten.split_with_sizes.default", "aten.cat.default")


def annotate(graph: Graph, mesh: tuple[int, ...]) -> Graph:
    """The graph with ``strategies`` for a mesh of that shape; those that lead nowhere (:mod:`.prune`) left out."""
    factors = reshape_factors(graph, mesh)
    sizes = sorted({size for size in mesh if size > 1})
    single = [_strategies(graph, (size,), partial(axis_strategies, factors=factors)) for size in sizes]
    joined = {node.name: tuple(dict.fromkeys(s for one in single for s in one[node.name])) for node in graph.nodes}
    live = live_placements(graph, joined)
    wanted = _wanted(graph, live)
    found = _strategies(graph, mesh, partial(_live_offers, factors=factors, wanted=wanted))
    return replace(graph, strategies=_kept(graph, found, live))


def _kept(graph: Graph, found: Mapping[str, tuple[Strategy, ...]], live: Live) -> dict[str, tuple[Strategy, ...]]:
    """The live strategies of each node; nodes of repeated layers, alike in everything that counts, are looked at
    once."""
    known: dict[object, tuple[Strategy, ...]] = {}
    kept: dict[str, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        values = (*node.operands, *(Value(node.name, index) for index in range(len(node.types))))
        # Equal calls share one list, so that its identity says enough and spares hashing hundreds of strategies.
        key = (node.op, id(found[node.name]), tuple(live.get(value) for value in values), node.types)
        if key not in known:
            known[key] = tuple(s for s in found[node.name] if node.is_placeholder or is_live(node, s, live))
        kept[node.name] = known[key]
    return kept


Wanted = Mapping[OpCall, tuple[frozenset[Placement], ...]]


def _wanted(graph: Graph, live: Live) -> Wanted:
    """For each operation the live placements of its operands and results, all nodes that are the same call taken
    together."""
    found: dict[OpCall, list[set[Placement]]] = {}
    for node in graph.nodes:
        if not node.is_placeholder and node.op != SAVED_ACTIVATION:
            values = [*node.operands, *(Value(node.name, i) for i in range(len(node.types)))]
            sets = found.setdefault(_key(op_call(graph, node)), [set() for _ in values])
            for known, value in zip(sets, values, strict=True):
                known.update(live.get(value, ()))
    return {call: tuple(map(frozenset, sets)) for call, sets in found.items()}


def _anywhere(call: OpCall) -> OpCall:
    """The call without where it looks."""
    return replace(call, args=without_positions(call.op, call.args))


def _key(call: OpCall) -> OpCall:
    """The call without where it looks, and without what sharding changes: its sizes."""
    inputs = tuple(TensorType((0,) * t.rank, t.dtype) for t in call.inputs)
    outputs = tuple(t and TensorType((0,) * t.rank, t.dtype) for t in call.outputs)
    return replace(_anywhere(call), inputs=inputs, outputs=outputs, size=1)


def _live_offers(call: OpCall, factors: Factors, wanted: Wanted) -> tuple[AxisStrategy, ...]:
    """One-axis strategies whose plain shards somebody wants; strided ones count by their dim, for inside another axis
    they are counted differently."""
    sets = wanted[_key(call)]
    dims = [{shard_dim(p) for p in found if is_shard(p)} for found in sets]

    def is_wanted(strategy: AxisStrategy) -> bool:
        places = zip((*strategy.inputs, *strategy.outputs), sets, dims, strict=True)
        return all(p == REPLICATE or p in found or shard_dim(p) in of_dims - {None} for p, found, of_dims in places)

    return tuple(strategy for strategy in axis_strategies(call, factors) if is_wanted(strategy))


def _strategies(
    graph: Graph, mesh: tuple[int, ...], offer: Callable[[OpCall], tuple[AxisStrategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    """All strategies of every node; calls that differ at most in where they look are composed once."""
    known: dict[OpCall, tuple[Strategy, ...]] = {}
    strategies: dict[str, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node.is_placeholder:
            strategies[node.name] = placeholder_strategies(node, mesh)
        elif node.op != SAVED_ACTIVATION:
            call = op_call(graph, node)
            anywhere = _anywhere(call)
            if anywhere not in known:
                known[anywhere] = _composed(call, mesh, offer, node)
            strategies[node.name] = known[anywhere]
    seen: dict[object, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node.op == SAVED_ACTIVATION:
            strategies[node.name] = _rest_strategies(graph, node, strategies, seen)
    return strategies


def _composed(
    call: OpCall, mesh: tuple[int, ...], offer: Callable[[OpCall], tuple[AxisStrategy, ...]], node: Node
) -> tuple[Strategy, ...]:
    try:
        return compose(call, mesh, offer)
    except OperatorError as error:
        where = f"in module {node.module!r}" if node.module else "in the model"
        raise OperatorError(f"{error} ({where}{f', {node.source}' if node.source else ''})") from error


def placeholder_strategies(node: Node, mesh: tuple[int, ...]) -> tuple[Strategy, ...]:
    """Where a placeholder can lie at the start of a step; a parameter wherever it can be stored and gathered from."""
    if node.op in REPLICATED_PLACEHOLDERS:
        return (Strategy((), ((REPLICATE,) * len(mesh),)),)
    empty = node.op == "param"
    return tuple(Strategy((), (p,)) for p in plain_placements(node.type, mesh, empty_shards=empty))


def plain_placements(kind: TensorType, mesh: tuple[int, ...], *, empty_shards: bool = False) -> list[Placements]:
    """Every placement of Replicate and plain Shard, on axes of more than one device; shards that leave a device nothing
    only if ``empty_shards``."""
    shape = tuple(int(size) for size in kind.shape)
    per_axis = [[REPLICATE, *(Shard(d) for d in range(len(shape)))] if n > 1 else [REPLICATE] for n in mesh]
    found = [tuple(choice) for choice in product(*per_axis) if is_valid(tuple(choice), shape, mesh)]
    everywhere = (REPLICATE,) * len(mesh)
    return [p for p in found if empty_shards or p == everywhere or shardable(shape, p, mesh)]


def _rest_strategies(
    graph: Graph, node: Node, known: Mapping[str, tuple[Strategy, ...]], seen: dict[object, tuple[Strategy, ...]]
) -> tuple[Strategy, ...]:
    """A value may rest in any placement its producer leaves it in or one of its users takes it in; ``seen`` remembers
    answers."""
    (value,) = node.operands
    users = [(known[u.name], i) for u, i in graph.users.get(Value(node.name), ()) if u.op != SAVED_ACTIVATION]
    key = (id(known[value.node]), value.index, *((id(found), i) for found, i in users))
    if key not in seen:
        places = dict.fromkeys(s.outputs[value.index] for s in known[value.node])
        places.update(dict.fromkeys(s.inputs[operand] for found, operand in users for s in found))
        seen[key] = tuple(Strategy((p,), (p,)) for p in places if all(map(_can_rest, p)))
    return seen[key]


def _can_rest(placement: Placement) -> bool:
    """Maxima and minima not yet taken over all devices are never kept."""
    return not isinstance(placement, Partial) or placement == PARTIAL_SUM
