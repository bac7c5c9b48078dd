"""Lists the strategies of every node of a concrete graph on a mesh (``graph.strategies``).

One-axis strategies come from written rules, otherwise from rules found by executing the operation
(:mod:`autopar.passes.probe.found_rules`). If nothing is found the operation is replicated, which the plan reports as a
fallback with its price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from torch.distributed.tensor import Partial, Shard

from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, TensorType, Value
from autopar.ir.placements import (
    PARTIAL_SUM,
    REPLICATE,
    AxisStrategy,
    Placement,
    Placements,
    Shares,
    Strategy,
    is_shard,
    is_valid,
    shard,
    shard_before,
    shard_dim,
)
from autopar.passes.probe.found_rules import found_strategies, refuted, source
from autopar.passes.rule_language.compose import compose, op_call, shardable
from autopar.passes.rule_language.dimension_strings import strided_variants
from autopar.passes.rule_language.registry import OpCall
from autopar.passes.rules import RULES

from .compositions import Compositions, alike
from .few_layers import FewLayers
from .fold import fold_layers
from .prune import Live, live_placements, live_strategies
from .unequal_shares import fitting_shares, unequal_strategies

Factors = Mapping[int, frozenset[int]]
RESHAPE = "aten.reshape.default"
REPLICATED_PLACEHOLDERS = ("buffer", "constant", "tangent", "random")


def axis_strategies(call: OpCall, factors: Factors) -> tuple[AxisStrategy, ...]:
    """The strategies of one axis except the replicated one, including strided variants for ``factors``, and those that
    divide rows in the call's shares."""
    if call.op == SAVED_ACTIVATION:
        return ()
    equal = _equal_strategies(call, factors)
    return (*equal, *unequal_strategies(call, partial(_equal_strategies, factors=factors)))


def _equal_strategies(call: OpCall, factors: Factors) -> tuple[AxisStrategy, ...]:
    strategies = tuple(RULES[call.op](call)) if call.op in RULES else found_strategies(replace(call, shares=()))
    variants = [v for strategy in strategies for v in strided_variants(call, strategy, factors)]
    return tuple(dict.fromkeys([*strategies, *variants]))


def needs_finding(graph: Graph) -> bool:
    """Whether the graph has operations without a written rule."""
    return any(not _has_rule(node) for node in graph.nodes)


def rule_sources(graph: Graph, mesh: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    """Where the rules of each operation come from: ``written``, the result of
    :func:`autopar.passes.probe.found_rules.source` for its calls (``fallback: ...`` if there is none), and
    ``refuted: ...`` for registered rules that are wrong."""
    sources: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        if not node.is_placeholder and node.op != SAVED_ACTIVATION:
            sources.setdefault(node.op, {}).update(dict.fromkeys(_sources(graph, node, mesh)))
    return {op: tuple(names) for op, names in sources.items()}


def _sources(graph: Graph, node: Node, mesh: tuple[int, ...]) -> list[str]:
    if node.op in RULES:
        return ["written"]
    sizes = sorted({n for n in mesh if n > 1})
    if not sizes:
        return ["none needed on one device"]
    calls = [op_call(graph, node, size) for size in sizes]
    wrong = [f"refuted: {rule}" for call in calls for rule in refuted(call)]
    sources = [source(call) for call in calls]
    # It is enough if one axis can be divided.
    return [*([s for s in sources if not s.startswith("fallback")] or sources)[:1], *wrong]


def rule_findings(graph: Graph, size: int) -> list[tuple[str, str, str]]:
    """For each kind of call without a written rule on an axis of ``size`` devices: the call, where its rule comes from,
    and its strategies."""
    calls = {op_call(graph, n, size): None for n in graph.nodes if not _has_rule(n)}
    return [(repr(call), source(call), ", ".join(map(str, found_strategies(call)))) for call in calls]


def _has_rule(node: Node) -> bool:
    return node.is_placeholder or node.op == SAVED_ACTIVATION or node.op in RULES


def reshape_factors(graph: Graph, mesh: tuple[int, ...], shares: Shares = ()) -> Factors:
    """For each dim size, the factors ``before`` of the strided shards that reshapes of the graph can produce: only
    these matter."""
    factors: defaultdict[int, set[int]] = defaultdict(set)

    def offer(call: OpCall) -> tuple[AxisStrategy, ...]:
        strategies = axis_strategies(call, {})
        for strategy in strategies:
            for tensor, placement in zip(call.tensors, strategy.places, strict=True):
                dim, before = shard_dim(placement), shard_before(placement)
                if tensor is not None and dim is not None and before > 1:
                    factors[int(tensor.shape[dim])].add(before)
        return strategies

    for call in {op_call(graph, node) for node in graph.nodes if node.op in FACTORING and node.op in RULES}:
        compose(call, mesh, offer, shares)
    return {size: frozenset(befores) for size, befores in factors.items()}


FACTORING = (RESHAPE, "aten.split.Tensor", "aten.split_with_sizes.default", "aten.cat.default")


def annotate(
    graph: Graph, mesh: tuple[int, ...], shares: Shares = (), compositions: Compositions | None = None
) -> Graph:
    """The graph with ``strategies`` for a mesh of that shape, pruned to those that lead somewhere (:mod:`.prune`).
    ``shares``: those in which rows may be divided, besides equal ones; if these rows do not divide so, the nearest that
    they do. ``compositions``: those of other graphs, which this shares."""
    folded = graph if graph.classes else fold_layers(graph)
    few, stacks = FewLayers().shortened(folded)
    known = _strategies_of_all(few, mesh, shares, compositions or Compositions())
    return graph.annotated(strategies=_of_all_layers(folded, known) if stacks else known)


def _of_all_layers(folded: Graph, known: Mapping[str, tuple[Strategy, ...]]) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of all nodes of a folded graph, from ``known`` ones. What is not known has those of the last node
    of its class before it: of a layer next to the first, or in backward to the last, of the same stack."""
    last, strategies = dict[str, tuple[Strategy, ...]](), dict[str, tuple[Strategy, ...]]()
    for node in folded.nodes:
        first = folded.classes[node.name]
        strategies[node.name] = last[first] = known[node.name] if node.name in known else last[first]
    return strategies


def _strategies_of_all(
    graph: Graph, mesh: tuple[int, ...], shares: Shares, compositions: Compositions
) -> Mapping[str, tuple[Strategy, ...]]:
    """The strategies of every node of a graph with classes."""
    shares = fitting_shares(graph, shares) or ((),) * len(mesh)
    factors, calls = reshape_factors(graph, mesh, shares), _distinct_calls(graph)
    sizes = sorted({each for each in zip(mesh, shares, strict=True) if each[0] > 1})
    offer, offered = partial(axis_strategies, factors=factors), frozenset(factors.items())
    single = [
        _strategies(
            graph,
            calls,
            (size,),
            (unequal,),
            partial(compositions.of, mesh=(size,), shares=(unequal,), offer=offer, offered=offered),
        )
        for size, unequal in sizes
    ]
    joined = _joined(graph, single)
    live = live_placements(graph, joined, graph.classes)
    wanted = _wanted(graph, calls, live)
    axes = [axis for axis, devices in enumerate(mesh) if devices > 1]
    find: Callable[[OpCall, Node], tuple[Strategy, ...]]
    if len(axes) == 1:
        find = partial(_on_one_axis, single[0], wanted, axes[0], len(mesh))
    else:
        live_offers = partial(_live_offers, factors=factors, wanted=wanted)

        def find(call: OpCall, node: Node) -> tuple[Strategy, ...]:
            # Sharding leaves the key as it is, so that nothing else is looked up in ``wanted``.
            return compositions.of(call, node, mesh, shares, live_offers, (offered, wanted[_key(call)]))

    composed = _strategies(graph, calls, mesh, shares, find)
    return _pruned(graph, composed, live)


def _joined(graph: Graph, single: Sequence[Mapping[str, tuple[Strategy, ...]]]) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of each node on an axis of any size. Those of equal nodes are joined once."""
    cache: dict[tuple[int, ...], tuple[Strategy, ...]] = {}
    joined: dict[str, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        key = tuple(id(axis[node.name]) for axis in single)
        if key not in cache:
            cache[key] = tuple(dict.fromkeys(s for axis in single for s in axis[node.name]))
        joined[node.name] = cache[key]
    return joined


def _pruned(graph: Graph, composed: Mapping[str, tuple[Strategy, ...]], live: Live) -> dict[str, tuple[Strategy, ...]]:
    """The live strategies of each node. Equal nodes of repeated layers are pruned once."""
    cache: dict[object, tuple[Strategy, ...]] = {}
    pruned: dict[str, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        values = (*node.operands, *(Value(node.name, index) for index in range(len(node.types))))
        # Equal calls share one list, so its identity suffices, and hundreds of strategies need not be hashed.
        key = (node.op, id(composed[node.name]), tuple(live.get(value) for value in values), node.types)
        if key not in cache:
            offered = composed[node.name]
            cache[key] = offered if node.is_placeholder else live_strategies(node, offered, live)
        pruned[node.name] = cache[key]
    return pruned


Wanted = Mapping[OpCall, tuple[frozenset[Placement], ...]]


def _wanted(graph: Graph, calls: Mapping[str, OpCall], live: Live) -> Wanted:
    """For each operation the live placements of its operands and results, united over all nodes with the same call."""
    live_sets: dict[OpCall, list[set[Placement]]] = {}
    seen: set[object] = set()
    for node in graph.nodes:
        if node.name not in calls:
            continue
        values = (*node.operands, *(Value(node.name, i) for i in range(len(node.types))))
        found = tuple(live.get(value, frozenset()) for value in values)
        # Equal layers share calls and what is live, so that their identities suffice.
        key = id(calls[node.name]), tuple(map(id, found))
        if key not in seen:
            seen.add(key)
            sets = live_sets.setdefault(_key(calls[node.name]), [set() for _ in values])
            for placements, more in zip(sets, found, strict=True):
                placements.update(more)
    return {call: tuple(map(frozenset, sets)) for call, sets in live_sets.items()}


def _distinct_calls(graph: Graph) -> dict[str, OpCall]:
    """The call of each operation, by its node. Calls that differ only in the positions they index are one object, the
    first of them."""
    known: dict[object, OpCall] = {}
    first: dict[OpCall, OpCall] = {}
    calls: dict[str, OpCall] = {}
    for node in graph.nodes:
        if node.is_placeholder or node.op == SAVED_ACTIVATION:
            continue
        key = node.form, tuple(map(graph.type_of, node.operands)), node.types
        if key not in known:
            call = op_call(graph, node)
            known[key] = first.setdefault(alike(call), call)
        calls[node.name] = known[key]
    return calls


def _key(call: OpCall) -> OpCall:
    """The call without the positions that it indexes, and without its sizes, which sharding changes."""
    inputs = tuple(TensorType((0,) * t.rank, t.dtype) for t in call.inputs)
    outputs = tuple(t and TensorType((0,) * t.rank, t.dtype) for t in call.outputs)
    return replace(alike(call), inputs=inputs, outputs=outputs, size=1, shares=())


def _live_offers(call: OpCall, factors: Factors, wanted: Wanted) -> tuple[AxisStrategy, ...]:
    """One-axis strategies that are wanted."""
    is_wanted = _wanting(call, wanted)
    return tuple(strategy for strategy in axis_strategies(call, factors) if is_wanted(strategy.places))


def _wanting(call: OpCall, wanted: Wanted) -> Callable[[tuple[Placement, ...]], bool]:
    """Whether the plain shards among the placements of operands and results, on one axis, are wanted. Strided shards
    are compared by their dim, since their factors differ inside another axis."""
    sets = wanted[_key(call)]
    dims = [{shard_dim(p) for p in placements if is_shard(p)} - {None} for placements in sets]

    def is_wanted(places: tuple[Placement, ...]) -> bool:
        return all(
            p == REPLICATE or p in live or shard_dim(p) in of for p, live, of in zip(places, sets, dims, strict=True)
        )

    return is_wanted


def _on_one_axis(
    single: Mapping[str, tuple[Strategy, ...]], wanted: Wanted, axis: int, axes: int, call: OpCall, node: Node
) -> tuple[Strategy, ...]:
    """The wanted strategies of ``call`` on a mesh where only ``axis`` has more than one device: as composed, from those
    of that axis alone."""
    is_wanted = _wanting(call, wanted)
    before, after = (REPLICATE,) * axis, (REPLICATE,) * (axes - axis - 1)

    def widened(places: tuple[Placements, ...]) -> tuple[Placements, ...]:
        return tuple((*before, *place, *after) for place in places)

    return tuple(
        replace(strategy, inputs=widened(strategy.inputs), outputs=widened(strategy.outputs))
        for strategy in single[node.name]
        if is_wanted(tuple(place[0] for place in strategy.places))
    )


def _strategies(
    graph: Graph,
    calls: Mapping[str, OpCall],
    mesh: tuple[int, ...],
    shares: Shares,
    find: Callable[[OpCall, Node], tuple[Strategy, ...]],
) -> dict[str, tuple[Strategy, ...]]:
    """All strategies of every node; ``find``: those of an operation, once for each of ``calls``
    (:func:`_distinct_calls`)."""
    cache: dict[int, tuple[Strategy, ...]] = {}
    strategies: dict[str, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node.is_placeholder:
            strategies[node.name] = placeholder_strategies(node, mesh, shares)
        elif node.op != SAVED_ACTIVATION:
            call = calls[node.name]
            if id(call) not in cache:
                cache[id(call)] = find(call, node)
            strategies[node.name] = cache[id(call)]
    seen: dict[object, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node.op == SAVED_ACTIVATION:
            strategies[node.name] = _saved_strategies(graph, node, strategies, seen)
    return strategies


def placeholder_strategies(node: Node, mesh: tuple[int, ...], shares: Shares = ()) -> tuple[Strategy, ...]:
    """The placements a placeholder may have at the start of a step; for a parameter all in which it can be stored, for
    an input also unequal ``shares`` of its rows."""
    if node.op in REPLICATED_PLACEHOLDERS:
        return (Strategy((), ((REPLICATE,) * len(mesh),)),)
    empty = node.op == "param"
    rows = shares if node.op == "input" and node.type.rank else ()
    return tuple(Strategy((), (p,)) for p in plain_placements(node.type, mesh, empty_shards=empty, shares=rows))


def plain_placements(
    kind: TensorType, mesh: tuple[int, ...], *, empty_shards: bool = False, shares: Shares = ()
) -> list[Placements]:
    """All placements of Replicate and plain Shard on axes of more than one device, and of ``shares`` of dim 0; shards
    that are empty on a device only if ``empty_shards``."""
    shape = tuple(int(size) for size in kind.shape)
    plain = [Shard(d) for d in range(len(shape))]
    per_axis = [
        [REPLICATE, *(plain if devices > 1 else []), *([shard(0, 1, each)] if each else [])]
        for devices, each in zip(mesh, shares or ((),) * len(mesh), strict=True)
    ]
    valid = [tuple(choice) for choice in product(*per_axis) if is_valid(tuple(choice), shape, mesh)]
    everywhere = (REPLICATE,) * len(mesh)
    return [p for p in valid if empty_shards or p == everywhere or shardable(shape, p, mesh)]


def _saved_strategies(
    graph: Graph, node: Node, strategies: Mapping[str, tuple[Strategy, ...]], cache: dict[object, tuple[Strategy, ...]]
) -> tuple[Strategy, ...]:
    """The strategies of a saved activation: any placement that its producer gives it or one of its users takes."""
    (value,) = node.operands
    users = [(strategies[u.name], i) for u, i in graph.users.get(Value(node.name), ()) if u.op != SAVED_ACTIVATION]
    key = (id(strategies[value.node]), value.index, *((id(offered), i) for offered, i in users))
    if key not in cache:
        places = dict.fromkeys(s.outputs[value.index] for s in strategies[value.node])
        places.update(dict.fromkeys(s.inputs[operand] for offered, operand in users for s in offered))
        cache[key] = tuple(Strategy((p,), (p,)) for p in places if all(map(_can_be_saved, p)))
    return cache[key]


def _can_be_saved(placement: Placement) -> bool:
    """Partial maxima and minima are never saved."""
    return not isinstance(placement, Partial) or placement == PARTIAL_SUM
