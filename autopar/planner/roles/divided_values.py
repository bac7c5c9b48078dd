"""Which placements of a value mean that devices have different samples of the batch, or different positions of the
sequence.

A dim of an input is followed through an annotated graph: a shard of a result is one of that dim if some strategy makes
it from such shards, with the weights of products whole. (Other weights may be in shards too: what is added to each
position has a row for each.) What shards are called differs from value to value: after batch and sequence
became one dim, ``S(0)`` are samples and ``S(0/8)`` positions. It also depends on the other axes of the mesh: where
samples and heads are one dim and each of four data ranks has one sample, the ``S(0)`` of a tensor axis are heads if
that of the data axis is ``S(0)``, and samples if it is ``R``. So the placements on all axes are followed together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ir.placements import REPLICATE, Placements, Strategy, is_shard

Shards = Mapping[Value, frozenset[Placements]]
_NONE: frozenset[Placements] = frozenset()


def shards_of(graph: Graph, axis: int, dims: Mapping[str, int], matrices: Mapping[str, Collection[int]]) -> Shards:
    """For each value of an annotated ``graph`` that depends on the inputs ``dims`` names: its placements in which the
    shards on mesh ``axis`` follow from these dims of the inputs. ``matrices``: by product, which of its operands are
    weights, that stay whole there."""
    found: dict[Value, frozenset[Placements]] = {}
    known: dict[object, dict[int, frozenset[Placements]]] = {}  # Equal layers share lists of strategies.
    for node in graph.nodes:
        offered = graph.strategies.get(node.name, ())
        if node.op == "input":
            dim = dims.get(node.target)
            places = (strategy.outputs[0] for strategy in offered)
            found[Value(node.name)] = frozenset(p for p in places if is_shard(p[axis]) and p[axis].dim == dim)  # type: ignore[union-attr]
        elif not node.is_placeholder:
            operands = tuple(found.get(value, _NONE) for value in node.operands)
            whole = tuple(matrices.get(node.name, ()))
            key = id(offered), operands, whole
            if key not in known:
                known[key] = _results(offered, operands, whole, axis)
            found.update((Value(node.name, index), shards) for index, shards in known[key].items())
    return {value: shards for value, shards in found.items() if shards}


def with_gradients(graph: Graph, axis: int, found: Shards, values: Collection[Value]) -> Shards:
    """``found`` of :func:`shards_of`, and of those of ``values`` that it lacks the placements in which they are read
    beside such shards, or for results in such. A loss that leaves rows out ends what follows from the inputs: what the
    gradient behind it is of is known by what it meets."""
    known = dict(found)
    for node in reversed(graph.nodes):
        lacking = [i for i, value in enumerate(node.operands) if value in values and value not in found]
        results = (Value(node.name, index) for index in range(len(node.types)))
        ends = [known.get(value, _NONE) for value in (*node.operands, *results)] if lacking else []
        for strategy in graph.strategies.get(node.name, ()) if any(ends) else ():
            pairs = zip(strategy.places, ends, strict=True)
            are_such = [place in end for place, end in pairs if end and is_shard(place[axis])]
            for i in lacking if are_such and all(are_such) else ():
                if is_shard(strategy.inputs[i][axis]):
                    value = node.operands[i]
                    known[value] = known.get(value, _NONE) | {strategy.inputs[i]}
    return known


def ending(graph: Graph, found: Shards) -> Node | None:
    """The first operation of forward that reads values of which shards are ``found``, and takes none of these."""
    for node in graph.nodes:
        read = [(i, found[value]) for i, value in enumerate(node.operands) if value in found]
        offered = graph.strategies.get(node.name, ()) if read and node.phase == "forward" else ()
        if offered and not any(strategy.inputs[i] in shards for strategy in offered for i, shards in read):
            return node
    return None


def _results(
    offered: tuple[Strategy, ...],
    operands: tuple[frozenset[Placements], ...],
    whole: tuple[int, ...],
    axis: int,
) -> dict[int, frozenset[Placements]]:
    """By result of an operation, its placements whose shards on ``axis`` follow from those of its ``operands``;
    ``whole``: which of these are weights, that stay whole."""
    known = [(i, shards) for i, shards in enumerate(operands) if shards]
    shards: dict[int, set[Placements]] = {}
    for strategy in offered if known else ():
        taken = strategy.inputs
        follows = any(taken[i] in ends for i, ends in known)
        if follows and all(taken[i] in ends or taken[i][axis] == REPLICATE for i, ends in known):
            if any(taken[i][axis] != REPLICATE for i in whole):
                continue
            for index, place in enumerate(strategy.outputs):
                if is_shard(place[axis]):
                    shards.setdefault(index, set()).add(place)
    return {index: frozenset(places) for index, places in shards.items()}
