"""Which moves of values a layout forbids on a tensor axis: gathers of weights, and what sequence parallelism says of
the values between products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch.distributed.tensor import Partial

from autopar.cost import family_of
from autopar.errors import OptionsError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ir.placements import REPLICATE, Placement, Placements, is_shard
from autopar.layout import degrees
from autopar.placement.choices import Choice
from autopar.placement.constraints import with_choices, without_moves
from autopar.placement.edges import TensorEdge
from autopar.placement.formulation import Instance

from .divided_values import Shards, ending, with_gradients
from .divides import divided_by_tensor
from .products import Products

# What a rule looks at of a value's placements: that on one axis, and whether it is a shard of positions.
Seen = tuple[Placement, bool]
# Whether a value may not go from one placement to another.
Forbidden = Callable[[Seen, Seen], bool]
# Of an edge, the placements that are shards of positions, and what is forbidden; None: nothing is.
Rule = Callable[[TensorEdge], tuple[frozenset[Placements], Forbidden] | None]


def keep_in_shards(instance: Instance, products: Products, axis: int) -> Instance:
    """The instance in which the shards of products' weights on ``axis`` are neither gathered nor exchanged."""

    def rule(edge: TensorEdge) -> tuple[frozenset[Placements], Forbidden] | None:
        if edge.producer not in products.views or edge.role == "gradient":
            return None
        return frozenset(), lambda source, target: is_shard(source[0]) and target != source

    return _without_moves(instance, axis, rule)


def divided_between(instance: Instance, products: Products, axis: int, sequence_parallel: bool | None) -> Instance:
    """The instance in which values between products are divided along the sequence on ``axis``, or not at all; None:
    as is cheapest. Raises :class:`OptionsError` if there is no sequence, or none that tensor ranks can divide."""
    if sequence_parallel is None:
        return instance
    if not sequence_parallel:
        return with_choices(instance, lambda node, choice: _is_whole(products, axis, node, choice))
    _check_rows(products, axis, instance.prices.mesh[axis])
    sums, followed = _sums(products, axis), products.positions[axis]
    positions = with_gradients(products.graph, axis, followed, sums)

    def rule(edge: TensorEdge) -> tuple[frozenset[Placements], Forbidden] | None:
        value = Value(edge.producer, edge.result)
        known = positions.get(value, frozenset())
        if edge.role == "gradient" or edge.producer in products.weights or not known:
            return None
        scattered, is_followed = value in sums, value in followed

        def forbidden(source: Seen, target: Seen) -> bool:
            (left, _), (needed, is_of_positions) = source, target
            if is_shard(left):
                return is_followed and is_shard(needed) and left != needed
            is_left = isinstance(left, Partial) and scattered
            return is_left and (needed == REPLICATE or (is_shard(needed) and not is_of_positions))

        return known, forbidden

    def allowed(node: Node, choice: Choice) -> bool:
        return not _cuts_sums(node, choice, axis, sums, positions)

    return _without_moves(with_choices(instance, allowed), axis, rule)


def _cuts_sums(node: Node, choice: Choice, axis: int, sums: set[Value], positions: Shards) -> bool:
    """Whether an operation of forward takes partial ``sums`` with a row for each of ``positions``, and makes some with
    other rows: these could only be summed on every device. (Backward makes gradients of weights, which are.)"""
    if isinstance(choice, ParameterPlacement) or node.is_placeholder or node.phase != "forward":
        return False
    taken = zip(node.operands, choice.inputs, strict=True)
    have_rows = [value in positions for value, place in taken if value in sums and isinstance(place[axis], Partial)]
    results = (Value(node.name, index) for index in range(len(node.types)))
    return any(have_rows) and any(result in sums and result not in positions for result in results)


def _check_rows(products: Products, axis: int, ranks: int) -> None:
    """Raises :class:`OptionsError` if no product computes one row for each position, or none behind lookups does so on
    ``ranks``, since an operation between needs the whole sequence."""
    graph, positions = products.graph, products.positions[axis]
    rows = {name for name in products.names if Value(name) in positions}
    if not rows:
        raise OptionsError(
            "Layout(sequence_parallel=True): no product computes one row for each position of a sequence, which is dim "
            "1 of every input; leave sequence_parallel out"
        )
    end = ending(graph, positions) if rows <= products.lookups else None
    if end is not None:
        raise OptionsError(
            f"Layout(sequence_parallel=True): {end.module or end.name} ({end.op}) takes no parts of the sequence on "
            f"{ranks} tensor ranks{_undivided(graph, ranks)}; leave sequence_parallel out"
        )


def _undivided(graph: Graph, ranks: int) -> str:
    """Which input has a sequence that does not divide among so many ``ranks``, and how many divide it and the heads."""
    heads = math.gcd(*divided_by_tensor(graph).values())
    for node in graph.placeholders("input"):
        size = int(node.type.shape[1]) if node.type.rank > 1 else 0
        if size % ranks:
            works = degrees("tensor", math.gcd(size, heads), ranks)
            return f": {node.target!r} {node.type} has a sequence of {size} (dim 1), which does not divide; {works}"
    return ""


def _is_whole(products: Products, axis: int, node: Node, choice: Choice) -> bool:
    """Whether no operand and no result is in shards of samples or of the sequence."""
    if isinstance(choice, ParameterPlacement) or node.is_placeholder:
        return True
    operands = zip(node.operands, choice.inputs, strict=True)
    results = ((Value(node.name, i), place) for i, place in enumerate(choice.outputs))
    shards = [(value, place) for value, place in (*operands, *results) if is_shard(place[axis])]
    known = products.samples[axis], products.positions[axis]
    return not any(place in of.get(value, ()) for value, place in shards for of in known)


def _sums(products: Products, axis: int) -> set[Value]:
    """The results of products, and what is computed from them by operations through which a sum can stay partial on
    ``axis``: views, additions, scaling, casts and so on."""
    graph, found = products.graph, set[Value]()
    for node in graph.nodes:
        results = [Value(node.name, index) for index in range(len(node.types))]
        if node.name in products.names or (not node.is_placeholder and family_of(node.op).matrix is not None):
            found.update(results)
            continue
        read = [place for place, operand in enumerate(node.operands) if operand in found]
        for strategy in graph.strategies.get(node.name, ()) if read else ():
            if any(isinstance(strategy.inputs[place][axis], Partial) for place in read):
                partial = (isinstance(placements[axis], Partial) for placements in strategy.outputs)
                found.update(result for result, is_left in zip(results, partial, strict=True) if is_left)
    return found


def _without_moves(instance: Instance, axis: int, rule: Rule) -> Instance:
    transfers = list(instance.problem.transfers)
    for index, edge in enumerate(instance.edges):
        ruled = rule(edge)
        if ruled is not None:
            known, forbidden = ruled
            seen = partial(_seen, axis, known)
            transfers[index] = without_moves(instance, edge, transfers[index], forbidden, seen)
    return replace(instance, problem=replace(instance.problem, transfers=tuple(transfers)))


def _seen(axis: int, positions: frozenset[Placements], places: Placements) -> Seen:
    return places[axis], places in positions
