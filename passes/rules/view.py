"""Changes of shape: reshapes, permutations, expansion.

A reshape keeps the row-major order of elements. A dim of stride ``s`` and size ``D`` covers the positions
between ``s`` and ``s D`` of that order, like a digit of a number. An input and an output dim share the digits
between the ``lcm`` of their strides and the ``gcd`` of their upper ends; sharding these digits in one shards the
same elements in the other. Sharding digits below the top of a dim is a strided shard of it::

    [b, s, h] -> [b s, h]        S(0) -> S(0), S(1) -> S(0/b), S(2) -> S(1)
    [b, 3 n d] -> [b, 3, n, d]   S(0) -> S(0), S(1) -> S(1), S(1/3) -> S(2), S(1/3n) -> S(3)

Shared digits must divide evenly; a dim that is the same in both may be sharded unevenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autopar.ir.node import Arg
from autopar.ir.placements import PARTIAL_SUM, AxisStrategy, Placement, shard, shard_dim
from autopar.passes.rule_language.claims import shape_of
from autopar.passes.rule_language.dimension_strings import Factors, agnostic, letters, shardable, strategies, variants
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser, rule

RESHAPES = tuple(
    f"aten.{name}"
    for name in (
        "reshape.default",
        "view.default",
        "_unsafe_view.default",
        "_reshape_copy.default",
        "view_copy.default",
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "flatten.using_ints",
        "unflatten.int",
    )
)
PERMUTATIONS = ("aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.permute_copy.default")
EXPANSIONS = ("aten.expand.default", "aten.expand_copy.default")


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim and its position in row-major order."""

    index: int
    size: int
    stride: int

    @property
    def top(self) -> int:
        return self.size * self.stride


def _dims(shape: tuple[int, ...]) -> list[_Dim]:
    return [_Dim(i, size, math.prod(shape[i + 1 :])) for i, size in enumerate(shape)]


def _shapes(call: OpCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    result = call.outputs[0]
    assert result is not None
    return shape_of(call, 0), tuple(int(size) for size in result.shape)


def _sharded_at(source: _Dim, target: _Dim, top: int, devices: int) -> AxisStrategy | None:
    """The strategy that shards the digits below ``top`` in both dims; None if they do not divide evenly."""
    common = math.lcm(source.stride, target.stride)
    if source.top % top or target.top % top or top % (common * devices):
        return None
    placed: list[Placement] = [shard(dim.index, dim.top // top) for dim in (source, target)]
    return AxisStrategy((placed[0],), (placed[1],))


@rule(*RESHAPES)
def reshape(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, ...)`` -> the same elements in another shape."""
    if call.inputs[0].dtype != torch.bool:
        yield AxisStrategy((PARTIAL_SUM,), (PARTIAL_SUM,))
    source_shape, target_shape = _shapes(call)
    if 0 in source_shape:
        return
    for source in _dims(source_shape):
        for target in _dims(target_shape):
            if (source.size, source.stride) == (target.size, target.stride):
                if shardable(source.size, call.size):
                    yield AxisStrategy((shard(source.index),), (shard(target.index),))
                continue
            strategy = _sharded_at(source, target, math.gcd(source.top, target.top), call.size)
            if strategy is not None:
                yield strategy


@variants(*RESHAPES)
def reshape_variants(call: OpCall, strategy: AxisStrategy, factors: Factors) -> Iterator[AxisStrategy]:
    """Shards of lower digits that the two dims of ``strategy`` share, for the factors of either."""
    dims = shard_dim(strategy.inputs[0]), shard_dim(strategy.outputs[0])
    if dims[0] is None or dims[1] is None:
        return
    source, target = (_dims(shape)[dim] for shape, dim in zip(_shapes(call), dims, strict=True) if dim is not None)
    tops = [
        d.top // before for d in (source, target) for before in sorted(factors.get(d.size, ())) if d.top % before == 0
    ]
    for top in dict.fromkeys(tops):
        variant = _sharded_at(source, target, top, call.size)
        if variant is not None and variant != strategy:
            yield variant


@localiser(*RESHAPES)
def local_reshape(context: LocalContext) -> LocalCall:
    """A reshape to the local target shape, whatever the operation was: ``view`` does not accept the strides that
    sharding leaves, and ``squeeze`` would depend on local sizes."""
    return "aten.reshape.default", (context.call.args[0], context.output_shape()), ()


def _order(call: OpCall) -> list[int]:
    rank = call.inputs[0].rank
    if "permute" in call.op:
        return [dim % rank for dim in call.arg(1, "dims")]
    order = list(range(rank))
    first, second = (0, rank - 1) if call.op == "aten.t.default" else (call.arg(1, "dim0"), call.arg(2, "dim1"))
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


@rule(*PERMUTATIONS)
@agnostic(*PERMUTATIONS)
def permute(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dims)``"""
    spelled = letters(call.inputs[0].rank)
    yield from strategies(call, f"{spelled}->{''.join(spelled[dim] for dim in _order(call))}")


@rule(*EXPANSIONS)
@agnostic(*EXPANSIONS)
def expand(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, sizes)``; a dim that is new or had length 1 can be sharded in the result."""
    result = call.outputs[0]
    assert result is not None
    spelled = letters(result.rank)
    yield from strategies(call, f"{spelled}->{spelled}")


@localiser(*EXPANSIONS)
def local_expand(context: LocalContext) -> LocalCall:
    """An expansion to the local sizes."""
    args: tuple[Arg, ...] = (context.call.args[0], context.output_shape())
    return context.call.op, args, context.call.kwargs
