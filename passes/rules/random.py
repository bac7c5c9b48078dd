"""Random draws: any part of the result can be made anywhere, for a number depends on its place in the whole.

The local form is the same draw with the local size and a description of where its elements stand: see
:mod:`autopar.ops.random`.
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
    """``(state, size, ...)``: the state whole, the result sharded on any dim, unless it is a part of something already
    that no loop over its dims describes."""
    result = call.outputs[0]
    assert result is not None
    if dict(call.kwargs).get("counts"):
        return
    for dim, size in enumerate(result.shape):
        if shardable(int(size), call.size):
            yield AxisStrategy((REPLICATE,), (Shard(dim),))


@localiser(*DRAWS)
def local_draw(context: LocalContext) -> LocalCall:
    """The part a device holds, as loops over positions of the whole."""
    call = context.call
    size = tuple(map(int, call.arg(1, "size")))
    given = dict(call.kwargs)
    if given.get("counts"):
        return call.op, call.args, call.kwargs
    strides = position_strides(size, given.get("samples", ()))
    runs = [
        (start * stride, count, step * stride)
        for dim, stride in enumerate(strides)
        for start, count, step in local_runs(size, context.outputs[0], context.mesh, context.coordinate, dim)
    ]
    given["first"] = given.get("first", 0) + sum(start for start, _, _ in runs)
    given["counts"] = tuple(count for _, count, _ in runs)
    given["strides"] = tuple(stride for _, _, stride in runs)
    args = tuple(context.output_shape() if index == 1 else arg for index, arg in enumerate(call.args))
    return call.op, args, tuple(given.items())


def draw_of_each_piece(first: LocalCall, second: LocalCall) -> LocalCall:
    """The draw that makes piece k where ``state[3]`` is k, from those of pieces 0 and 1: all are equally large, and so
    equally far apart."""
    op, args, kwargs = first
    given = dict(kwargs)
    each = dict(second[2])["first"] - given["first"]
    dim = given.pop("samples", (0, 0))[0]
    if each or dim:
        given["samples"] = (dim, each)
    size = args[1]
    if (given["first"], given["counts"], given["strides"]) == (0, size, position_strides(size, (dim, each))):
        given = {key: arg for key, arg in given.items() if key not in ("first", "counts", "strides")}
    return op, args, tuple(given.items())
