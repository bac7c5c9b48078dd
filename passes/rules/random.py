"""Random draws: any device can draw any part of the result, since each number depends only on its position.

The local form is the same draw with the local size and the positions of its elements: see :mod:`autopar.ops.random`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from autopar.ir.placements import REPLICATE, AxisStrategy, local_runs
from autopar.ops.random import DRAWS, position_strides
from autopar.passes.rule_language.dimension_strings import agnostic, shardable
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser, rule


@rule(*DRAWS)
@agnostic(*DRAWS)
def draw(call: OpCall) -> Iterator[AxisStrategy]:
    """``(state, size, ...)``: the state is replicated, the result sharded on any dim, unless it is already a part that
    no loop over its dims describes."""
    result = call.outputs[0]
    assert result is not None
    if dict(call.kwargs).get("counts"):
        return
    for dim, size in enumerate(result.shape):
        if shardable(int(size), call.size):
            yield AxisStrategy((REPLICATE,), (Shard(dim),))


@localiser(*DRAWS)
def local_draw(context: LocalContext) -> LocalCall:
    """The part that a device draws, as loops over positions of the whole."""
    call = context.call
    size = tuple(map(int, call.arg(1, "size")))
    options = dict(call.kwargs)
    if options.get("counts"):
        return call.op, call.args, call.kwargs
    strides = position_strides(size, options.get("samples", ()))
    runs = [
        (start * stride, count, step * stride)
        for dim, stride in enumerate(strides)
        for start, count, step in local_runs(size, context.outputs[0], context.mesh, context.coordinate, dim)
    ]
    options["first"] = options.get("first", 0) + sum(start for start, _, _ in runs)
    options["counts"] = tuple(count for _, count, _ in runs)
    options["strides"] = tuple(stride for _, _, stride in runs)
    args = tuple(context.output_shape() if index == 1 else arg for index, arg in enumerate(call.args))
    return call.op, args, tuple(options.items())


def draw_of_each_piece(first: LocalCall, second: LocalCall) -> LocalCall:
    """The draw that gives piece k where ``state[3]`` is k, from those of pieces 0 and 1. All pieces have the same size,
    and so the same distance."""
    op, args, kwargs = first
    options = dict(kwargs)
    distance = dict(second[2])["first"] - options["first"]
    dim = options.pop("samples", (0, 0))[0]
    if distance or dim:
        options["samples"] = (dim, distance)
    size = args[1]
    if (options["first"], options["counts"], options["strides"]) == (0, size, position_strides(size, (dim, distance))):
        options = {key: arg for key, arg in options.items() if key not in ("first", "counts", "strides")}
    return op, args, tuple(options.items())
