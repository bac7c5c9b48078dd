"""Strategies that divide rows in unequal shares, from those that divide them equally.

Two devices with shares 3 and 1 hold what four equal parts would: the first has three of them, one after the other. A
strategy that is true of four devices is therefore true of these two, since neighbouring parts of a dim may be one part.
A rule found by experiment is true of any division, even or not, and is asked about the devices themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.node import TensorType
from autopar.ir.placements import (
    AxisStrategy,
    Placement,
    Placements,
    Shares,
    is_shard,
    is_valid,
    shard,
    shard_before,
    shard_dim,
)
from autopar.ir.row_shares import apportioned
from autopar.ops.exchanged_experts import EXCHANGES
from autopar.passes.rule_language.registry import OpCall
from autopar.passes.rules import RULES


def fitting_shares(graph: Graph, shares: Shares) -> Shares:
    """``shares``, where they divide the rows of the graph's inputs exactly, and otherwise the shares of these rows that
    are nearest: a program for other rows than were planned."""
    rows = Counter(int(node.type.shape[0]) for node in graph.placeholders("input") if node.type.rank)
    if not rows or not any(shares):
        return ()
    return tuple(_nearest(rows.most_common(1)[0][0], each) if each else () for each in shares)


def _nearest(rows: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    return shares if rows % sum(shares) == 0 else apportioned(rows, shares)


def unequal_strategies(call: OpCall, offered: Callable[[OpCall], tuple[AxisStrategy, ...]]) -> Iterator[AxisStrategy]:
    """What ``offered`` lists for ``call``, in its shares. Only dims that the shares divide exactly are divided so, and
    no block of experts that exchanges rows: its messages assume equal shares."""
    shares = call.shares
    if not shares:
        return
    parts = sum(shares) if call.op in RULES else call.size
    for strategy in offered(replace(call, size=parts, shares=())):
        if strategy.local.removeprefix("autopar.") in EXCHANGES:
            continue
        unequal = replace(strategy, inputs=_in(shares, strategy.inputs), outputs=_in(shares, strategy.outputs))
        pairs = zip(call.tensors, unequal.places, strict=True)
        if unequal != strategy and all(_divides(kind, place, call.size) for kind, place in pairs):
            yield unequal


def _in(shares: tuple[int, ...], places: Placements) -> Placements:
    return tuple(_unequal(place, shares) for place in places)


def _unequal(place: Placement, shares: tuple[int, ...]) -> Placement:
    dim = shard_dim(place)
    return place if dim is None else shard(dim, shard_before(place), shares)


def _divides(kind: TensorType | None, place: Placement, devices: int) -> bool:
    return kind is None or not is_shard(place) or is_valid((place,), tuple(map(int, kind.shape)), (devices,))
