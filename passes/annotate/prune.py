"""Drops placements that no costly operation can use, before they multiply.

A pointwise operation can be sharded on every dim of its tensors, and a reshape on every factor; most of these shards
lead nowhere. A placement of a value is *live* if a strategy of an anchor has it, or if a strategy of another operation
links it to a live placement. Anchors are operations that do real work (matrix products, convolutions, attention,
lookups, normalisation, reductions to Partial) and inputs of the model. Strided and unequal shards of an anchor are not
live by themselves; they only link live placements, so that unequal ones follow the rows of inputs. Partial operands of
products are dropped too: delaying a reduction past a product saves nothing.

Equal nodes of repeated layers share what is live: it is computed once for each class, as the union over its nodes.

This removes choices, never correctness; replication always remains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch.distributed.tensor import Partial, Shard

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ir.placements import OWN_KINDS, REPLICATE, Placement, Strategy, is_shard

ANCHORS = [
    "mm",
    "bmm",
    "mv",
    "dot",
    "addmm",
    "baddbmm",
    "convolution",
    "convolution_backward",
    "embedding",
    "embedding_dense_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "_softmax",
    "_softmax_backward_data",
    "gather",
    "scatter",
    "scatter_add",
    "index",
    "index_put",
    "index_select",
    "_grouped_mm",
    "attention",
    "attention_backward",
]
BILINEAR = ("aten.mul.Tensor", "aten.mm.default", "aten.bmm.default", "aten.div.Tensor", "aten.convolution.default")

Placed = tuple[Value, Placement]
Live = Mapping[Value, frozenset[Placement]]
SELF: Mapping[str, str] = MappingProxyType({})


def is_anchor(node: Node) -> bool:
    """Whether the operation does work worth dividing."""
    name = node.op.split(".")[1] if node.op.count(".") == 2 else node.op
    return name in ANCHORS or (not node.is_placeholder and not node.op.startswith(("aten.", "autopar.")))


def _anchors(node: Node, strategy: Strategy) -> bool:
    """Whether a strategy's placements are live by themselves."""
    if any(isinstance(p[0], OWN_KINDS) for p in strategy.places):
        return False
    reduces = any(isinstance(p[0], Partial) for p in strategy.outputs)
    operands = [p[0] for p in strategy.inputs]
    return is_anchor(node) or (reduces and any(isinstance(p, Shard) for p in operands) and _is_large(node))


def _is_large(node: Node) -> bool:
    """Whether a result is not a scalar: full reductions do not make placements live."""
    return any(kind is not None and kind.rank > 0 for kind in node.types)


def live_placements(
    graph: Graph, strategies: Mapping[str, Iterable[Strategy]], classes: Mapping[str, str] = SELF
) -> Live:
    """The live placements of every value; ``strategies`` are those of a mesh of one axis. ``classes``: for each node
    the first of those that share what is live, and have equal strategies; by default every node is its own class."""
    found = _live_of_classes(graph, strategies, classes)
    live: dict[Value, frozenset[Placement]] = {}
    for node in graph.nodes:
        first = classes.get(node.name, node.name)
        for value, shared in zip(_results(node.name, node), _results(first, node), strict=True):
            if shared in found:
                live[value] = found[shared]
    return live


def _results(name: str, node: Node) -> list[Value]:
    return [Value(name, index) for index in range(len(node.types))]


def _live_of_classes(
    graph: Graph, strategies: Mapping[str, Iterable[Strategy]], classes: Mapping[str, str]
) -> dict[Value, frozenset[Placement]]:
    """The live placements of the results of the first node of each class."""
    live: defaultdict[Value, set[Placement]] = defaultdict(set)
    waiting: defaultdict[Placed, list[tuple[Placed, ...]]] = defaultdict(list)
    queue: list[Placed] = []
    for node, name, operands in _distinct(graph, classes):
        for strategy in strategies[node.name]:
            places = _sharded_places(strategy, (*operands, *_results(name, node)))
            if node.op in ("input", "cache") or _anchors(node, strategy):
                queue += places
                continue
            for place in places:
                if is_shard(place[1]):
                    waiting[place].append(places)
                elif place[0] in operands:
                    # A wanted Partial does not make the operand's placement live; it only flows forward.
                    waiting[place].append(tuple(p for p in places if p[0].node == name))
    while queue:
        value, placement = queue.pop()
        if placement not in live[value]:
            live[value].add(placement)
            for linked in waiting[value, placement]:
                queue += linked
    return {value: frozenset(placements) for value, placements in live.items()}


def _distinct(graph: Graph, classes: Mapping[str, str]) -> Iterator[tuple[Node, str, tuple[Value, ...]]]:
    """The operations and inputs of the graph with their class and the classes of their operands, each such call
    once."""
    seen: set[tuple[str, tuple[Value, ...]]] = set()
    for node in graph.nodes:
        name = classes.get(node.name, node.name)
        operands = tuple(Value(classes.get(v.node, v.node), v.index) for v in node.operands)
        if node.op != "param" and (name, operands) not in seen:
            seen.add((name, operands))
            yield node, name, operands


def _sharded_places(strategy: Strategy, values: tuple[Value, ...]) -> tuple[Placed, ...]:
    """Value and (one-axis) placement of the operands and results that a strategy does not replicate."""
    return tuple((v, p[0]) for v, p in zip(values, strategy.places, strict=True) if p[0] != REPLICATE)


def live_strategies(node: Node, strategies: Iterable[Strategy], live: Live) -> tuple[Strategy, ...]:
    """Those of some strategies (of any mesh) that have only live placements, and no Partial operand of a product."""
    values = (*node.operands, *_results(node.name, node))
    allowed = [live.get(value, frozenset()) | {REPLICATE} for value in values]
    found = (s for s in strategies if all(of.issuperset(p) for of, p in zip(allowed, s.places, strict=True)))
    if node.op in BILINEAR and _is_large_product(node):
        return tuple(strategy for strategy in found if not _takes_partial(strategy))
    return tuple(found)


def _is_large_product(node: Node) -> bool:
    return any(kind is not None and torch.Size(map(int, kind.shape)).numel() > 1 for kind in node.types)


def _takes_partial(strategy: Strategy) -> bool:
    return any(isinstance(p, Partial) for places in strategy.inputs for p in places)
