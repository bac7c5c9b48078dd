"""Which placements of a value mean that devices have different samples of the batch, or different positions of the
sequence.

A dim of an input is followed through an annotated graph: a shard of a result is one of that dim if some strategy makes
it from such shards, with weights whole. What shards are called differs from value to value: after batch and sequence
became one dim, ``S(0)`` are samples and ``S(0/8)`` positions.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.placements import REPLICATE, AxisStrategy, Placement, Strategy, is_shard

Shards = Mapping[Value, frozenset[Placement]]
_NONE: frozenset[Placement] = frozenset()


def shards_of(graph: Graph, axis: int, dims: Mapping[str, int], weights: frozenset[str]) -> Shards:
    """For each value of an annotated ``graph`` that depends on the inputs ``dims`` names: its shards on mesh ``axis``
    that follow from these dims of the inputs. ``weights``: the nodes that stay whole."""
    found: dict[Value, frozenset[Placement]] = {}
    projected: dict[int, tuple[AxisStrategy, ...]] = {}
    known: dict[object, dict[int, frozenset[Placement]]] = {}  # Equal layers share lists of strategies.
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
            operands = tuple(found.get(value, _NONE) for value in node.operands)
            whole = tuple(value.node in weights for value in node.operands)
            key = id(strategies), operands, whole
            if key not in known:
                known[key] = _results(offered, operands, whole)
            found.update((Value(node.name, index), shards) for index, shards in known[key].items())
    return {value: shards for value, shards in found.items() if shards}


def _on_axis(strategies: tuple[Strategy, ...], axis: int) -> tuple[AxisStrategy, ...]:
    every = (
        AxisStrategy(tuple(place[axis] for place in s.inputs), tuple(place[axis] for place in s.outputs))
        for s in strategies
    )
    return tuple(dict.fromkeys(every))


def _results(
    offered: tuple[AxisStrategy, ...], operands: tuple[frozenset[Placement], ...], are_whole: tuple[bool, ...]
) -> dict[int, frozenset[Placement]]:
    """By result of an operation, its shards that follow from those of its ``operands``; ``are_whole``: which of these
    are weights, that stay whole."""
    known = [(i, shards) for i, shards in enumerate(operands) if shards]
    whole = [i for i, is_whole in enumerate(are_whole) if is_whole]
    shards: dict[int, frozenset[Placement]] = {}
    for strategy in offered if known else ():
        taken = strategy.inputs
        follows = any(taken[i] in ends for i, ends in known)
        if follows and all(taken[i] in ends or taken[i] == REPLICATE for i, ends in known):
            if any(taken[i] != REPLICATE for i in whole):
                continue
            for index, place in enumerate(strategy.outputs):
                if is_shard(place):
                    shards[index] = shards.get(index, _NONE) | {place}
    return shards
