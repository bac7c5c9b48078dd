"""Convolutions of any rank, transposed and grouped ones included.

Sizes are read from the types: input [N, Cin, ...], output [N, Cout, ...], weight [Cout, Cin/groups, ...] or,
transposed, [Cin, Cout/groups, ...]. Spatial dims stay whole.

===========  =====  ======  ============  =======
sharded      input  weight  bias          output
===========  =====  ======  ============  =======
batch        S(0)   R       R             S(0)
Cout         R      S(out)  S(0)          S(1)
Cin          S(1)   S(in)   P(sum)        P(sum)
groups       S(1)   S(0)    S(0)          S(1)
===========  =====  ======  ============  =======

The second and third need one group; the last needs cuts between groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.ir.node import Arg
from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.claims import P, R, S, claim, claim_rule, operand, shape_of, shards_align
from autopar.passes.rule_language.dimension_strings import Factors, agnostic_variants, variants
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser


def _groups(in_channels: int, out_channels: int, weight: tuple[int, ...], transposed: bool) -> int:
    return (out_channels if transposed else in_channels) // weight[1]


@claim_rule("aten.convolution.default", agnostic=False)
def convolution(call: OpCall) -> Iterator[AxisStrategy]:
    """``convolution(input, weight, bias?, stride, padding, dilation, transposed, output_padding, groups)``"""
    bias = operand(call, 2, "bias")
    transposed = bool(call.arg(6, "transposed"))
    result = call.outputs[0]
    assert result is not None
    channels = shape_of(call, 0)[1], int(result.shape[1])
    groups = _groups(*channels, shape_of(call, 1), transposed)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    yield claim(call, {0: S(0)}, [S(0)])
    yield claim(call, {0: P, bias: P}, [P])
    yield claim(call, {1: P, bias: P}, [P])
    if groups == 1:
        yield claim(call, {1: S(out_dim), bias: S(0)}, [S(1)])
        yield claim(call, {0: S(1), 1: S(in_dim), bias: P}, [P])
    elif shards_align(groups, channels, call.size):
        yield claim(call, {0: S(1), 1: S(0), bias: S(0)}, [S(1)])


@claim_rule("aten.convolution_backward.default", agnostic=False)
def convolution_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``convolution_backward(grad, input, weight, bias_sizes?, ..., groups, output_mask)`` -> gradients of
    input, weight, bias"""
    transposed = bool(call.arg(7, "transposed"))
    channels = shape_of(call, 1)[1], shape_of(call, 0)[1]
    groups = _groups(*channels, shape_of(call, 2), transposed)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    yield claim(call, {0: S(0), 1: S(0)}, [S(0), P, P])
    yield claim(call, {0: P}, [P, P, P])
    if groups == 1:
        yield claim(call, {0: S(1), 2: S(out_dim)}, [P, S(out_dim), S(0)])
        yield claim(call, {1: S(1), 2: S(in_dim)}, [S(1), S(in_dim), R])
    elif shards_align(groups, channels, call.size):
        yield claim(call, {0: S(1), 1: S(1), 2: S(0)}, [S(1), S(0), S(0)])


def _replace_at(args: tuple[Arg, ...], changes: dict[int, Arg]) -> tuple[Arg, ...]:
    return tuple(changes.get(position, arg) for position, arg in enumerate(args))


@localiser("aten.convolution.default")
def local_convolution(context: LocalContext) -> LocalCall:
    """The convolution with the local ``groups``."""
    call = context.call
    transposed = bool(call.arg(6, "transposed"))
    channels = context.input_shape(0)[1], context.output_shape()[1]
    groups = _groups(*channels, context.input_shape(1), transposed)
    return call.op, _replace_at(call.args, {8: groups}), call.kwargs


@localiser("aten.convolution_backward.default")
def local_convolution_backward(context: LocalContext) -> LocalCall:
    """The gradients with the local ``groups`` and ``bias_sizes``."""
    call = context.call
    transposed = bool(call.arg(7, "transposed"))
    channels = context.input_shape(1)[1], context.input_shape(0)[1]
    changes: dict[int, Arg] = {9: _groups(*channels, context.input_shape(2), transposed)}
    if call.args[3] is not None:
        changes[3] = (channels[1],)
    return call.op, _replace_at(call.args, changes), call.kwargs


@variants("aten.convolution.default", "aten.convolution_backward.default")
def strided_convolution(call: OpCall, strategy: AxisStrategy, factors: Factors) -> Iterable[AxisStrategy]:
    """Strided variants of the batch dim only, since channels of a group belong together."""
    return agnostic_variants(call, strategy, factors) if strategy.inputs[0] == S(0) else ()
