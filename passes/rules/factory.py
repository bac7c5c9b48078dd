"""Factory operations: constant tensors can be created in shards.

``full_like`` and similar operations read only the shape of their operand, and ``new_full`` and similar ones not even
that, so any placement of it works. For ``arange`` over integers each device creates its own part; over fractions every
device creates the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Shard

from autopar.ir.node import Arg, TensorType
from autopar.ir.placements import PARTIAL_SUM, REPLICATE, AxisStrategy, Placement
from autopar.passes.rule_language.dimension_strings import agnostic, letters, shardable, strategies
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser, rule

# Operation -> position of the size argument.
_SIZED = {
    "aten.full.default": 0,
    "aten.zeros.default": 0,
    "aten.ones.default": 0,
    "aten.empty.memory_format": 0,
    "aten.new_full.default": 1,
    "aten.new_zeros.default": 1,
    "aten.new_ones.default": 1,
    "aten.new_empty.default": 1,
}
_LIKE = tuple(f"aten.{name}_like.default" for name in ("full", "zeros", "ones", "empty"))


def _shards(tensor: TensorType | None, devices: int) -> list[Placement]:
    if tensor is None:
        return []
    return [Shard(dim) for dim, size in enumerate(tensor.shape) if shardable(int(size), devices)]


def _partial(call: OpCall) -> list[Placement]:
    """The Partial placements of an operand; booleans cannot be summed."""
    return [] if call.inputs[0].dtype == torch.bool else [PARTIAL_SUM]


@rule(*_SIZED)
@agnostic(*_SIZED)
def sized(call: OpCall) -> Iterator[AxisStrategy]:
    """``(size, ...)`` or ``(x, size, ...)``: any placement of the result with any of ``x``"""
    results = _shards(call.outputs[0], call.size)
    if not call.inputs:
        yield from (AxisStrategy((), (placement,)) for placement in results)
        return
    for operand in (REPLICATE, *_partial(call), *_shards(call.inputs[0], call.size)):
        for result in (REPLICATE, *results):
            if (operand, result) != (REPLICATE, REPLICATE):
                yield AxisStrategy((operand,), (result,))


@localiser(*_SIZED)
def local_size(context: LocalContext) -> LocalCall:
    """The same operation with the local size."""
    call = context.call
    at = _SIZED[call.op]
    kwargs = tuple((key, context.output_shape() if key == "size" else arg) for key, arg in call.kwargs)
    args: tuple[Arg, ...] = tuple(context.output_shape() if i == at else arg for i, arg in enumerate(call.args))
    return call.op, args, kwargs


@rule(*_LIKE)
@agnostic(*_LIKE)
def like(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, ...)`` -> shape of ``x``; its values do not matter"""
    spelled = letters(call.inputs[0].rank)
    yield from strategies(call, f"{spelled}->{spelled}", linear=())
    yield from (AxisStrategy((placement,), (REPLICATE,)) for placement in _partial(call))


_COUNTS = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")


def _count_args(call: OpCall) -> tuple[Arg, Arg]:
    """Start and step."""
    if call.op == "aten.arange.default":
        return 0, 1
    return call.arg(0, "start"), call.arg(2, "step", 1) if call.op == "aten.arange.start_step" else 1


def _counts_integers(call: OpCall) -> bool:
    return all(isinstance(arg, int) for arg in _count_args(call))


@rule(*_COUNTS)
def count(call: OpCall) -> Iterator[AxisStrategy]:
    """``(end)``, ``(start, end)`` or ``(start, end, step)``; fractions stay whole, since they round by position"""
    if _counts_integers(call):
        yield from (AxisStrategy((), (placement,)) for placement in _shards(call.outputs[0], call.size))


@localiser(*_COUNTS)
def local_count(context: LocalContext) -> LocalCall:
    """The numbers of the device's part, in the dtype of the whole: a fractional end makes integers floats."""
    call = context.call
    if not _counts_integers(call):
        return call.op, call.args, call.kwargs
    start, step = map(int, _count_args(call))
    first = start + context.output_offset(0, 0) * step
    args: tuple[Arg, ...] = (first, first + context.output_shape()[0] * step, step)
    options = {key: arg for key, arg in call.kwargs if key not in ("start", "end", "step")}
    result = call.outputs[0]
    assert result is not None
    return "aten.arange.start_step", args, tuple({**options, "dtype": result.dtype}.items())
