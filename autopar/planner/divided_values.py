"""Which placements of a value mean that devices have different samples of the batch, or different positions of the
sequence.

A dim of an input is followed through an annotated graph: a shard of a result is one of that dim if some strategy makes
it from such shards, with weights whole. What shards are called differs from value to value: after batch and sequence
became one dim, ``S(0)`` are samples and ``S(0/8)`` positions.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ir.placements import REPLICATE, AxisStrategy, Placement, Strategy, is_shard

Shards = Mapping[Value, frozenset[Placement]]
_NONE: frozenset[Placement] = frozenset()


def shards_of(graph: Graph, axis: int, dims: Mapping[str, int], weights: frozenset[str]) -> Shards:
    """For each value of an annotated ``graph`` that depends on the inputs ``dims`` names: its shards on mesh ``axis``
    that follow from these dims of the inputs. ``weights``: the nodes that stay whole."""
    found: dict[Value, frozenset[Placement]] = {}
    projected: dict[int, tuple[AxisStrategy, ...]] = {}
    for node in graph.nodes:
        strategies = graph.strategies.get(node.name, ())
        if id(strategies) not in projected:
            projected[id(strategies)] = _on_axis(strategies, axis)
        offered = projected[id(strategies)]
        if node.op == "input":
            dim = dims.get(node.target)
            places = (strategy.outputs[0] for strategy in offered)
            found[Value(node.name)] = frozenset(p for p in places if is_shard(p) and p.dim == dim)  # type: ignore[union-attr]
        elif not node.is_placeholder:
            found.update(_results(node, offered, found, weights))
    return {value: shards for value, shards in found.items() if shards}


def _on_axis(strategies: tuple[Strategy, ...], axis: int) -> tuple[AxisStrategy, ...]:
    every = (
        AxisStrategy(tuple(place[axis] for place in s.inputs), tuple(place[axis] for place in s.outputs))
        for s in strategies
    )
    return tuple(dict.fromkeys(every))


def _results(
    node: Node, offered: tuple[AxisStrategy, ...], found: Mapping[Value, frozenset[Placement]], weights: frozenset[str]
) -> dict[Value, frozenset[Placement]]:
    known = [(i, found[value]) for i, value in enumerate(node.operands) if found.get(value)]
    whole = [i for i, value in enumerate(node.operands) if value.node in weights]
    shards: dict[Value, frozenset[Placement]] = {}
    for strategy in offered if known else ():
        taken = strategy.inputs
        follows = any(taken[i] in ends for i, ends in known)
        if follows and all(taken[i] in ends or taken[i] == REPLICATE for i, ends in known):
            if any(taken[i] != REPLICATE for i in whole):
                continue
            for index, place in enumerate(strategy.outputs):
                if is_shard(place):
                    value = Value(node.name, index)
                    shards[value] = shards.get(value, _NONE) | {place}
    return shards
