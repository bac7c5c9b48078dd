"""Normalisations: the dims not normalised over can be sharded; group norm also by whole groups of
channels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from autopar.ir.node import TensorType
from autopar.ir.placements import AxisStrategy, Placement
from autopar.passes.rule_language.claims import P, R, S, claim, claim_rule, operand, shape_of, shards_align
from autopar.passes.rule_language.dimension_strings import Factors, agnostic_variants, variants
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser


def _rows(call: OpCall, x: int) -> range:
    return range(call.inputs[x].rank - len(call.arg(x + 1, "normalized_shape")))


def _like(tensor: TensorType | None, dim: int, length: int) -> Placement:
    """Sharded on ``dim`` if the tensor has that dim in full; statistics may be empty or flat."""
    return S(dim) if tensor is not None and tensor.rank > dim and tensor.shape[dim] == length else R


@claim_rule("aten.native_layer_norm.default", "aten._fused_rms_norm.default", "aten.rms_norm.default")
def layer_norm(call: OpCall) -> Iterator[AxisStrategy]:
    """``(input, normalized_shape, weight?, ...)`` -> output and, mostly, statistics per row"""
    for dim in _rows(call, 0):
        yield claim(call, {0: S(dim)}, [_like(t, dim, shape_of(call, 0)[dim]) for t in call.outputs])


@claim_rule("aten.native_layer_norm_backward.default")
def layer_norm_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, input, normalized_shape, mean, rstd, weight?, bias?, mask)`` -> gradients of input, weight,
    bias"""
    for dim in _rows(call, 1):
        yield claim(call, {0: S(dim), 1: S(dim), 2: S(dim), 3: S(dim)}, [S(dim), P, P])


@claim_rule("aten._fused_rms_norm_backward.default")
def rms_norm_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, input, normalized_shape, rstd, weight?, mask)`` -> gradients of input, weight"""
    for dim in _rows(call, 1):
        yield claim(call, {0: S(dim), 1: S(dim), 2: S(dim)}, [S(dim), P])


@claim_rule("aten.native_group_norm.default", agnostic=False)
def group_norm(call: OpCall) -> Iterator[AxisStrategy]:
    """``(input, weight?, bias?, N, C, HxW, group, eps)`` -> output, mean [N, groups], rstd [N, groups]"""
    weight, bias, mean = operand(call, 1, "weight"), operand(call, 2, "bias"), call.outputs[1]
    assert mean is not None
    yield claim(call, {0: S(0)}, [S(0), S(0), S(0)])
    if shards_align(int(mean.shape[1]), [shape_of(call, 0)[1]], call.size):
        yield claim(call, {0: S(1), weight: S(0), bias: S(0)}, [S(1), S(1), S(1)])


@claim_rule("aten.native_group_norm_backward.default", agnostic=False)
def group_norm_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, input, mean, rstd, weight?, N, C, HxW, group, mask)`` -> gradients of input, weight, bias"""
    weight = operand(call, 4, "weight")
    yield claim(call, {0: S(0), 1: S(0), 2: S(0), 3: S(0)}, [S(0), P, P])
    if shards_align(shape_of(call, 2)[1], [shape_of(call, 0)[1]], call.size):
        yield claim(call, {0: S(1), 1: S(1), 2: S(1), 3: S(1), weight: S(0)}, [S(1), S(0), S(0)])


@claim_rule("aten._weight_norm_interface.default")
def weight_norm(call: OpCall) -> Iterator[AxisStrategy]:
    """``(v, g, dim=0)`` -> weight, norms [.., length of dim, ..]; the norms are over all other dims"""
    dim = int(call.arg(2, "dim", 0)) % call.inputs[0].rank
    yield claim(call, {0: S(dim), 1: S(dim)}, [S(dim), S(dim)])
    yield claim(call, {1: P}, [P, R])


@claim_rule("aten._weight_norm_interface_backward.default")
def weight_norm_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, v, g, norms, dim)`` -> gradients of v and g"""
    dim = int(call.arg(4, "dim")) % call.inputs[1].rank
    yield claim(call, dict.fromkeys(range(4), S(dim)), [S(dim), S(dim)])
    yield claim(call, {0: P}, [P, P])


def _local_sizes(x: tuple[int, ...], groups: int) -> tuple[int, int, int, int]:
    return x[0], x[1], math.prod(x[2:]), groups


@localiser("aten.native_group_norm.default")
def local_group_norm(context: LocalContext) -> LocalCall:
    """N, C, HxW and group as counted on the device."""
    op, args = context.call.op, context.call.args
    sizes = _local_sizes(context.input_shape(0), context.output_shape(1)[1])
    return op, (*args[:3], *sizes, *args[7:]), context.call.kwargs


@localiser("aten.native_group_norm_backward.default")
def local_group_norm_backward(context: LocalContext) -> LocalCall:
    """N, C, HxW and group as counted on the device."""
    op, args = context.call.op, context.call.args
    sizes = _local_sizes(context.input_shape(1), context.input_shape(2)[1])
    return op, (*args[:5], *sizes, *args[9:]), context.call.kwargs


@variants("aten.native_group_norm.default", "aten.native_group_norm_backward.default")
def strided_group_norm(call: OpCall, strategy: AxisStrategy, factors: Factors) -> Iterable[AxisStrategy]:
    """Strided variants of the batch dim only, since channels of a group belong together."""
    return agnostic_variants(call, strategy, factors) if strategy.inputs[0] == S(0) else ()
