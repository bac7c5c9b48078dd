"""Composes one-axis strategies over the axes of a mesh.

Rules list the strategies of the outermost axis for global types, those of the next axis for the local types of one
device of the first, and so on: each axis divides what the axes outside of it leave. If a shard is uneven, devices have
different shapes; a strategy of an inner axis counts only if it is offered for each of them. Invariants: every composed
strategy is valid for the global types (:func:`autopar.ir.placements.is_valid`); no operand or result is empty on a
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, TensorType, Value
from autopar.ir.placements import (
    REPLICATE,
    AxisStrategy,
    Placement,
    Placements,
    Shares,
    Strategy,
    chunk_bounds,
    factor_groups,
    is_valid,
    local_shape,
    shard,
    shard_before,
    shard_dim,
    shares_of,
)

from .registry import OpCall, Operand


def op_call(graph: Graph, node: Node, size: int = 1) -> OpCall:
    """``node`` in the form that rules take: operands replaced by their positions, with their types."""
    position = iter(range(len(node.operands)))

    def leaf(arg: Arg) -> Arg:
        if isinstance(arg, Value):
            return Operand(next(position))
        return tuple(map(leaf, arg)) if isinstance(arg, tuple) else arg

    args = tuple(map(leaf, node.args))
    kwargs = tuple((key, leaf(arg)) for key, arg in node.kwargs)
    inputs = tuple(graph.type_of(value) for value in node.operands)
    return OpCall(node.op, inputs, node.types, args, kwargs, size)


def _local_sizes(size: int, placement: Placement, devices: int) -> set[int]:
    before, shares = shard_before(placement), shares_of(placement)
    indices = range(devices) if shares else (0, devices - 1)
    return {before * chunk_bounds(size // before, devices, index, shares)[1] for index in indices}


def _local_types(tensor: TensorType | None, placement: Placement, devices: int) -> list[TensorType | None]:
    """The distinct local types on the devices of an axis, largest first."""
    dim = shard_dim(placement)
    if tensor is None or dim is None:
        return [tensor]
    sizes = sorted(_local_sizes(int(tensor.shape[dim]), placement, devices), reverse=True)
    return [TensorType((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]), tensor.dtype) for size in sizes]


def local_calls(call: OpCall, strategy: AxisStrategy, devices: int) -> list[OpCall]:
    """The local calls of the devices of an axis under ``strategy``: one per distinct combination of shapes."""
    inputs = [_local_types(t, p, devices) for t, p in zip(call.inputs, strategy.inputs, strict=True)]
    outputs = [_local_types(t, p, devices) for t, p in zip(call.outputs, strategy.outputs, strict=True)]
    kinds = max((len(types) for types in (*inputs, *outputs)), default=1)
    return [
        replace(
            call,
            inputs=tuple(types[min(k, len(types) - 1)] for types in inputs),  # type: ignore[misc]
            outputs=tuple(types[min(k, len(types) - 1)] for types in outputs),
        )
        for k in range(kinds)
    ]


def _global_before(outer: Placements, dim: int, before: int, mesh: tuple[int, ...]) -> int:
    """The global ``before`` of a shard, from the ``before`` on a device of the ``outer`` axes."""
    counted, divided = before, 1
    for group_before, axes in factor_groups(outer, dim):
        degree = math.prod(mesh[axis] for axis in axes)
        if before > group_before // divided:
            counted *= degree
        divided *= degree
    return counted


def _extend(outer: Placements, placement: Placement, mesh: tuple[int, ...]) -> Placements:
    dim = shard_dim(placement)
    if shard_before(placement) > 1 and dim is not None:
        placement = shard(dim, _global_before(outer, dim, shard_before(placement), mesh), shares_of(placement))
    return (*outer, placement)


def _counts_alike(outer: Placements, placement: Placement) -> bool:
    """Whether ``before`` of ``placement`` is the same on all devices of the ``outer`` axes: not if these divide the
    factor before it in unequal shares."""
    dim = shard_dim(placement)
    return shard_before(placement) == 1 or not any(shares_of(p) for p in outer if shard_dim(p) == dim)


def _no_empty_shard(tensor: TensorType | None, placement: Placement, devices: int) -> bool:
    dim = shard_dim(placement)
    if tensor is None or dim is None or shares_of(placement):  # Shares divide exactly, and none is 0.
        return True
    return chunk_bounds(int(tensor.shape[dim]), devices, devices - 1)[1] > 0


def _fits(call: OpCall, strategy: AxisStrategy, devices: int) -> bool:
    pairs = zip(call.tensors, strategy.places, strict=True)
    return all(_no_empty_shard(tensor, placement, devices) for tensor, placement in pairs)


def replicated(call: OpCall) -> AxisStrategy:
    """The strategy that every operation has: run in full on every device."""
    return AxisStrategy((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))


Offer = Callable[[OpCall], tuple[AxisStrategy, ...]]
Inner = Callable[[OpCall, int], tuple[AxisStrategy, ...]]


def _merge_local(outer: str, inner: str) -> str | None:
    """The local operation for both axes, or None if they need different ones."""
    return outer or inner if not (outer and inner) or outer == inner else None


def _inner(call: OpCall, mesh: tuple[int, ...], axis: int, offer: Offer, shares: Shares) -> tuple[AxisStrategy, ...]:
    """The strategies of one axis for ``call``, the replicated one first; does not call ``offer`` on an axis of one
    device."""
    if mesh[axis] == 1:
        return (replicated(call),)
    here = replace(call, size=mesh[axis], shares=shares[axis] if shares else ())
    offered = dict.fromkeys([replicated(call), *offer(here)])
    return tuple(strategy for strategy in offered if _fits(call, strategy, mesh[axis]))


def _walk(calls: list[OpCall], outer: Strategy, mesh: tuple[int, ...], axis: int, inner: Inner) -> Iterator[Strategy]:
    if axis == len(mesh):
        yield outer
        return
    first, *others = (inner(call, axis) for call in calls)
    for strategy in first:
        if not all(strategy in other for other in others):
            continue
        local = _merge_local(outer.local, strategy.local)
        if local is None or not all(map(_counts_alike, outer.places, strategy.places)):
            continue
        grown = Strategy(
            tuple([_extend(o, p, mesh) for o, p in zip(outer.inputs, strategy.inputs, strict=True)]),
            tuple([_extend(o, p, mesh) for o, p in zip(outer.outputs, strategy.outputs, strict=True)]),
            local,
        )
        # Nothing is asked of what the innermost axis leaves.
        left = [] if axis + 1 == len(mesh) else _left(calls, strategy, mesh[axis])
        yield from _walk(left, grown, mesh, axis + 1, inner)


def _left(calls: list[OpCall], strategy: AxisStrategy, devices: int) -> list[OpCall]:
    """The distinct local calls that an axis leaves of ``calls``."""
    return list(dict.fromkeys(local for call in calls for local in local_calls(call, strategy, devices)))


def _is_valid(call: OpCall, strategy: Strategy, mesh: tuple[int, ...]) -> bool:
    pairs = zip(call.tensors, strategy.places, strict=True)
    return all(t is None or is_valid(p, tuple(map(int, t.shape)), mesh) for t, p in pairs)


def compose(call: OpCall, mesh: tuple[int, ...], offer: Offer, shares: Shares = ()) -> tuple[Strategy, ...]:
    """All strategies of ``call`` on ``mesh``, the fully replicated one first; ``offer(call)`` lists those of one axis
    of ``call.size`` devices, with ``call.shares``."""
    start = Strategy(((),) * len(call.inputs), ((),) * len(call.outputs))
    # Many strategies of the axes outside leave the same call.
    inner = cache(lambda left, axis: _inner(left, mesh, axis, offer, shares))
    strategies = dict.fromkeys(_walk([call], start, mesh, 0, inner))
    return tuple(strategy for strategy in strategies if _is_valid(call, strategy, mesh))


def shardable(shape: tuple[int, ...], placements: Placements, mesh: tuple[int, ...]) -> bool:
    """Whether shards of a tensor of that shape are non-empty on every device."""
    least = tuple(
        each.index(min(each)) if (each := shares_of(placement)) else devices - 1
        for placement, devices in zip(placements, mesh, strict=True)
    )
    return all(local_shape(shape, placements, mesh, least))
