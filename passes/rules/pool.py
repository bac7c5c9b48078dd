"""Pooling and resampling: batch and channel dims can be sharded, spatial dims stay whole.

The table gives the number of spatial dims; in every operand and result the batch and channel dims come before
them. Operations that are linear in their first operand also accept a Partial one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.claims import P, S, claim, claim_rule
from autopar.passes.rule_language.dimension_strings import letters, strategies
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser

# Operation -> the number of dims that it pools over.
_LINEAR_POOLS = {
    "aten.avg_pool1d.default": 1,
    "aten.avg_pool2d.default": 2,
    "aten.avg_pool3d.default": 3,
    "aten.avg_pool2d_backward.default": 2,
    "aten.avg_pool3d_backward.default": 3,
    "aten._adaptive_avg_pool2d.default": 2,
    "aten._adaptive_avg_pool3d.default": 3,
    "aten._adaptive_avg_pool2d_backward.default": 2,
    "aten._adaptive_avg_pool3d_backward.default": 3,
    "aten.max_pool2d_with_indices_backward.default": 2,
    "aten.max_pool3d_with_indices_backward.default": 3,
    "aten.adaptive_max_pool2d_backward.default": 2,
    "aten.adaptive_max_pool3d_backward.default": 3,
}
# Operation -> the number of dims that it pools over.
_MAX_POOLS = {
    "aten.max_pool2d_with_indices.default": 2,
    "aten.max_pool3d_with_indices.default": 3,
    "aten.adaptive_max_pool2d.default": 2,
    "aten.adaptive_max_pool3d.default": 3,
}
# Operation -> the number of dims that it resamples.
_RESAMPLINGS = {
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_nearest3d": 3,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}


def _with_batch_dims(spatial: int, linear: bool) -> Callable[[OpCall], Iterator[AxisStrategy]]:
    def sharded_in_front(call: OpCall) -> Iterator[AxisStrategy]:
        x = letters(call.inputs[0].rank, range(-spatial, 0))
        operands = ",".join([x] * len(call.inputs))
        yield from strategies(call, f"{operands}->{x}", linear=[[0]] if linear else ())

    return sharded_in_front


for _op, _spatial in _LINEAR_POOLS.items():
    claim_rule(_op)(_with_batch_dims(_spatial, linear=True))
for _op, _spatial in _MAX_POOLS.items():
    claim_rule(_op)(_with_batch_dims(_spatial, linear=False))
for _name, _spatial in _RESAMPLINGS.items():
    for _op in (f"aten.{_name}.default", f"aten.{_name}.vec", f"aten.{_name}_backward.default"):
        claim_rule(_op)(_with_batch_dims(_spatial, linear=True))


@localiser(*(f"aten.{name}_backward.default" for name in _RESAMPLINGS))
def local_resampling_backward(context: LocalContext) -> LocalCall:
    """``(grad, output_size, input_size, ...)`` with the local ``input_size``."""
    args = context.call.args
    return context.call.op, (*args[:2], context.output_shape(), *args[3:]), context.call.kwargs


@claim_rule("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(call: OpCall) -> Iterator[AxisStrategy]:
    """``(input [N, C, ...], grid [N, ...], ...)``"""
    yield claim(call, {0: S(0), 1: S(0)}, [S(0)])
    yield claim(call, {0: S(1)}, [S(1)])
    yield claim(call, {0: P}, [P])


@claim_rule("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sampler_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad [N, C, ...], input, grid, ...)`` -> gradients of input and grid"""
    yield claim(call, {0: S(0), 1: S(0), 2: S(0)}, [S(0), S(0)])
    yield claim(call, {0: S(1), 1: S(1)}, [S(1), P])
    yield claim(call, {0: P}, [P, P])
