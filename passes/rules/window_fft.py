"""Diagonals, sliding windows, complex pairs, Fourier transforms: dims that they leave unchanged can be sharded."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.claims import P, S, claim, claim_rule
from autopar.passes.rule_language.dimension_strings import WHOLE, agnostic, dimension_rule, letters, strategies, without
from autopar.passes.rule_language.registry import OpCall, rule

dimension_rule("aten.view_as_real.default", "...->..._")
dimension_rule("aten.view_as_complex.default", "..._->...")
dimension_rule("aten.view_as_real_copy.default", "...->..._")
dimension_rule("aten.view_as_complex_copy.default", "..._->...")


def _diagonal_dims(call: OpCall, first: int) -> tuple[int, int]:
    return call.arg(first, "dim1", 0), call.arg(first + 1, "dim2", 1)


@rule("aten.diagonal.default", "aten.diagonal_copy.default")
@agnostic("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, offset, dim1, dim2)`` -> the other dims, then the diagonal"""
    dims = _diagonal_dims(call, 2)
    spelled = letters(call.inputs[0].rank, dims)
    yield from strategies(call, f"{spelled}->{without(spelled, dims)}{WHOLE}")


@rule("aten.diagonal_backward.default")
@agnostic("aten.diagonal_backward.default")
def diagonal_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, input_sizes, offset, dim1, dim2)``"""
    result = call.outputs[0]
    assert result is not None
    dims = _diagonal_dims(call, 3)
    spelled = letters(result.rank, dims)
    yield from strategies(call, f"{without(spelled, dims)}{WHOLE}->{spelled}")


@rule("aten.unfold.default", "aten.unfold_copy.default")
@agnostic("aten.unfold.default", "aten.unfold_copy.default")
def unfold(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, size, step)`` -> dims of ``x`` with the number of windows in ``dim``, then the window"""
    spelled = letters(call.inputs[0].rank, [call.arg(1, "dimension")])
    yield from strategies(call, f"{spelled}->{spelled}{WHOLE if spelled else ''}")


@rule("aten.unfold_backward.default")
@agnostic("aten.unfold_backward.default")
def unfold_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, input_sizes, dim, size, step)``"""
    result = call.outputs[0]
    assert result is not None
    spelled = letters(result.rank, [call.arg(2, "dim")])
    yield from strategies(call, f"{spelled}{WHOLE}->{spelled}")


@rule("aten._fft_r2c.default", "aten._fft_c2c.default", "aten._fft_c2r.default")
@agnostic("aten._fft_r2c.default", "aten._fft_c2c.default", "aten._fft_c2r.default")
def fourier(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dims, ...)``"""
    spelled = letters(call.inputs[0].rank, call.arg(1, "dim"))
    yield from strategies(call, f"{spelled}->{spelled}")


@rule("aten.bucketize.Tensor", "aten.isin.Tensor_Tensor")
@agnostic("aten.bucketize.Tensor", "aten.isin.Tensor_Tensor")
def membership(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, table, ...)``: each element of ``x`` is looked up in the whole table"""
    spelled = letters(call.inputs[0].rank)
    yield from strategies(call, f"{spelled},{WHOLE * call.inputs[1].rank}->{spelled}", linear=())


@claim_rule("aten.im2col.default", "aten.col2im.default")
def columns(call: OpCall) -> Iterator[AxisStrategy]:
    """``([batch,] channels, height, width)`` <-> ``([batch,] channels times window, windows)``, window innermost"""
    image = call.inputs[0] if call.op == "aten.im2col.default" else call.outputs[0]
    assert image is not None
    yield claim(call, {0: P}, [P])
    if image.rank == 4:
        yield claim(call, {0: S(0)}, [S(0)])
    channel = image.rank - 3
    if int(image.shape[channel]) % call.size == 0:
        yield claim(call, {0: S(channel)}, [S(channel)])
