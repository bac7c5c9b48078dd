"""Slices, concatenations and padding: the dims that they leave unchanged can be sharded.

``split`` into equal pieces and ``cat`` of equal pieces can also be sharded along their own dim. The placements of the
pieces and of the whole then differ: the whole is read as ``pieces x length``, and the second factor is sharded::

    split [b, 3 h] -> 3 x [b, h]      S(1/3) -> S(1) S(1) S(1)
    cat   2 x [b, h] -> [b, 2 h]      S(1) S(1) -> S(1/2)
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.node import Arg, TensorType
from autopar.ir.placements import AxisStrategy, Placement, shard
from autopar.passes.rule_language.claims import shape_of
from autopar.passes.rule_language.dimension_strings import (
    WHOLE,
    Factors,
    agnostic,
    agnostic_variants,
    letters,
    strategies,
    variants,
    without,
)
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser, rule

SPLITS = (
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.split_with_sizes_copy.default",
    "aten.split_copy.Tensor",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
)
CAT = "aten.cat.default"
# Operation -> the number of dims that it pads; 0: as many as it is given pairs.
_PADS = {
    "aten.constant_pad_nd.default": 0,
    "aten.reflection_pad1d.default": 1,
    "aten.reflection_pad2d.default": 2,
    "aten.reflection_pad3d.default": 3,
    "aten.replication_pad1d.default": 1,
    "aten.replication_pad2d.default": 2,
    "aten.replication_pad3d.default": 3,
}


def _dim(call: OpCall, position: int, rank: int) -> int:
    return int(call.arg(position, "dim", 0)) % max(rank, 1)


def _result(call: OpCall) -> TensorType:
    result = call.outputs[0]
    assert result is not None
    return result


def _pieces(call: OpCall) -> list[TensorType]:
    tensors = call.inputs if call.op == CAT else call.outputs
    return [tensor for tensor in tensors if tensor is not None]


def _cut_dim(call: OpCall) -> int:
    whole = _result(call) if call.op == CAT else call.inputs[0]
    return _dim(call, 1 if call.op == CAT else 2, whole.rank)


def _through_pieces(call: OpCall, before: int = 1) -> Iterator[AxisStrategy]:
    """The strategy that shards each of the equal pieces with factor ``before``, and the whole in the same places."""
    pieces, dim = _pieces(call), _cut_dim(call)
    lengths = {int(p.shape[dim]) if p.rank > dim else 0 for p in pieces}
    length = lengths.pop()
    if lengths or not length or length % (before * call.size):
        return
    inside: tuple[Placement, ...] = (shard(dim, before),) * len(pieces)
    outside: tuple[Placement, ...] = (shard(dim, before * len(pieces)),)
    yield AxisStrategy(inside, outside) if call.op == CAT else AxisStrategy(outside, inside)


@variants(*SPLITS, CAT)
def piece_variants(call: OpCall, strategy: AxisStrategy, factors: Factors) -> Iterator[AxisStrategy]:
    """Along other dims as usual; along the cut dim also pieces that are strided themselves."""
    yield from agnostic_variants(call, strategy, factors)
    if strategy not in _through_pieces(call):
        return
    pieces, dim = _pieces(call), _cut_dim(call)
    length = int(pieces[0].shape[dim])
    befores = {*factors.get(length, ()), *(b // len(pieces) for b in factors.get(length * len(pieces), ()))}
    for before in sorted(befores - {0, 1}):
        yield from _through_pieces(call, before)


@rule(*SPLITS)
def split(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, size or sizes, dim)`` -> pieces"""
    spelled = letters(call.inputs[0].rank, [_cut_dim(call)])
    yield from strategies(call, f"{spelled}->{spelled}")
    yield from _through_pieces(call)


@localiser(*SPLITS)
def local_split(context: LocalContext) -> LocalCall:
    """A split by the local sizes of the pieces."""
    call, dim = context.call, _cut_dim(context.call)
    sizes = tuple(context.output_shape(index)[dim] for index in range(len(call.outputs)))
    return "aten.split_with_sizes.default", (call.args[0], sizes, dim), ()


@rule(CAT)
def cat(call: OpCall) -> Iterator[AxisStrategy]:
    """``([a, b, ...], dim)``; a tensor of shape [0] among them, which torch skips, stays whole"""
    whole = _result(call)
    spelled = letters(whole.rank, [_cut_dim(call)])
    operands = (spelled if tensor.rank == whole.rank else WHOLE for tensor in call.inputs)
    yield from strategies(call, f"{'+'.join(operands)}->{spelled}")
    yield from _through_pieces(call)


@rule("aten.stack.default")
@agnostic("aten.stack.default")
def stack(call: OpCall) -> Iterator[AxisStrategy]:
    """``([a, b, ...], dim)``"""
    rank = _result(call).rank
    dim = _dim(call, 1, rank)
    result = letters(rank, [dim])
    yield from strategies(call, f"{'+'.join([without(result, [dim])] * len(call.inputs))}->{result}")


@rule("aten.select.int", "aten.select_copy.int", "aten.unbind.int", "aten.unbind_copy.int")
@agnostic("aten.select.int", "aten.select_copy.int", "aten.unbind.int", "aten.unbind_copy.int")
def select(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, ...)`` -> one or more tensors without ``dim``"""
    rank = call.inputs[0].rank
    dim = _dim(call, 1, rank)
    spelled = letters(rank, [dim])
    yield from strategies(call, f"{spelled}->{without(spelled, [dim])}")


@rule("aten.select_backward.default")
@agnostic("aten.select_backward.default")
def select_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, input_sizes, dim, index)``"""
    rank = _result(call).rank
    dim = _dim(call, 2, rank)
    result = letters(rank, [dim])
    yield from strategies(call, f"{without(result, [dim])}->{result}")


@rule("aten.select_scatter.default")
@agnostic("aten.select_scatter.default")
def select_scatter(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, source, dim, index)``"""
    rank = call.inputs[0].rank
    dim = _dim(call, 2, rank)
    spelled = letters(rank, [dim])
    yield from strategies(call, f"{spelled}+{without(spelled, [dim])}->{spelled}")


def _letters_outside(call: OpCall, dim: int, part: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """The letters of all dims except the sliced one; of that one too if the slice is the whole dim."""
    return letters(len(whole), [] if part == whole else [dim])


@rule("aten.slice.Tensor", "aten.slice_copy.Tensor", "aten.slice_backward.default")
@agnostic("aten.slice.Tensor", "aten.slice_copy.Tensor", "aten.slice_backward.default")
def slice_(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, start, end, step)`` or ``(grad, input_sizes, dim, start, end, step)``"""
    source, target = shape_of(call, 0), tuple(int(size) for size in _result(call).shape)
    dim = _dim(call, 2 if call.op == "aten.slice_backward.default" else 1, len(source))
    spelled = _letters_outside(call, dim, source, target)
    yield from strategies(call, f"{spelled}->{spelled}")


@rule("aten.slice_scatter.default")
@agnostic("aten.slice_scatter.default")
def slice_scatter(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, source, dim, start, end, step)``"""
    dim = _dim(call, 2, call.inputs[0].rank)
    spelled = _letters_outside(call, dim, shape_of(call, 1), shape_of(call, 0))
    yield from strategies(call, f"{spelled}+{spelled}->{spelled}")


@localiser(
    *("aten.select_backward.default", "aten.slice_backward.default"),
    *("aten.unfold_backward.default", "aten.diagonal_backward.default"),
)
def local_input_sizes(context: LocalContext) -> LocalCall:
    """``(grad, input_sizes, ...)`` with the local sizes."""
    args: tuple[Arg, ...] = (context.call.args[0], context.output_shape(), *context.call.args[2:])
    return context.call.op, args, context.call.kwargs


@rule(*_PADS)
@agnostic(*_PADS)
def pad(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, pad, value)``: two numbers for each padded dim, the last dim first."""
    rank, amounts = call.inputs[0].rank, call.arg(1, "pad")
    if call.op == "aten.constant_pad_nd.default":
        padded = [-1 - i // 2 for i, amount in enumerate(amounts) if amount]
        linear = [(0,)] if call.arg(2, "value", 0) == 0 else ()
    else:
        # All spatial dims, unpadded ones too: these kernels identify dims by position.
        padded, linear = [-1 - i for i in range(_PADS[call.op])], [(0,)]
    spelled = letters(rank, padded)
    yield from strategies(call, f"{spelled}->{spelled}", linear=linear)


@rule("aten.repeat.default")
@agnostic("aten.repeat.default")
def repeat(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, repeats)``: dims repeated once pass through."""
    repeats = call.arg(1, "repeats")
    result = letters(len(repeats), [dim for dim, times in enumerate(repeats) if times != 1])
    yield from strategies(call, f"{result[len(repeats) - call.inputs[0].rank :]}->{result}")


@rule("aten.repeat_interleave.self_int")
@agnostic("aten.repeat_interleave.self_int")
def repeat_interleave(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, repeats, dim)``; without a dim ``x`` is flattened first."""
    dim, rank = call.arg(2, "dim"), call.inputs[0].rank
    if dim is not None:
        spelled = letters(rank, [dim])
        yield from strategies(call, f"{spelled}->{spelled}")


@rule("aten.triu.default", "aten.tril.default")
@agnostic("aten.triu.default", "aten.tril.default")
def triangle(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, diagonal)`` of the last two dims"""
    spelled = letters(call.inputs[0].rank, [-1, -2])
    yield from strategies(call, f"{spelled}->{spelled}")
