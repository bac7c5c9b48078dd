"""Softmax and similar operations: every dim except the reduced one can be sharded."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.claims import claim_rule
from autopar.passes.rule_language.dimension_strings import letters, strategies, without
from autopar.passes.rule_language.registry import OpCall


@claim_rule("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
def softmax(call: OpCall) -> Iterator[AxisStrategy]:
    """``(input, dim, ...)``"""
    x = letters(call.inputs[0].rank, [call.arg(1, "dim")])
    yield from strategies(call, f"{x}->{x}", linear=())


@claim_rule("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def softmax_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, output, dim, dtype)``; linear in ``grad``"""
    x = letters(call.inputs[0].rank, [call.arg(2, "dim")])
    yield from strategies(call, f"{x},{x}->{x}", linear=[[0]])


@claim_rule("aten.logsumexp.default")
def logsumexp(call: OpCall) -> Iterator[AxisStrategy]:
    """``(input, dims, keepdim)``; no dims means all"""
    rank, dim = call.inputs[0].rank, call.arg(1, "dim")
    dims = (dim,) if isinstance(dim, int) else tuple(dim) or range(rank)
    x = letters(rank, dims)
    result = x if call.arg(2, "keepdim", False) else without(x, dims)
    yield from strategies(call, f"{x}->{result}", linear=())
