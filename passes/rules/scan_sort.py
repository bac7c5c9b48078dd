"""Scans, sorts and shifts, which process some dims in order: every other dim can be sharded."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.dimension_strings import agnostic, letters, strategies
from autopar.passes.rule_language.registry import OpCall, rule

# Name -> the position of the dim argument and its default.
_ALONG = {
    "cumsum.default": (1, None),
    "cumprod.default": (1, None),
    "logcumsumexp.default": (1, None),
    "cummax.default": (1, None),
    "cummin.default": (1, None),
    "sort.default": (1, -1),
    "sort.stable": (2, -1),
    "argsort.default": (1, -1),
    "argsort.stable": (2, -1),
    "topk.default": (2, -1),
    "flip.default": (1, None),
    "roll.default": (2, ()),
}
_LINEAR = ("aten.cumsum.default", "aten.flip.default", "aten.roll.default")
_OPS = tuple(f"aten.{name}" for name in _ALONG)


def _dims(call: OpCall) -> tuple[int, ...]:
    """The dims that the operation processes in order; ``roll`` without dims processes all, flattened."""
    position, default = _ALONG[call.op.removeprefix("aten.")]
    dims = call.arg(position, "dims" if call.op in ("aten.flip.default", "aten.roll.default") else "dim", default)
    if dims == () and call.op == "aten.roll.default":
        return tuple(range(call.inputs[0].rank))
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _keeps_sums(call: OpCall) -> bool:
    result = call.outputs[0]
    assert result is not None
    return call.op in _LINEAR and (result.dtype.is_floating_point or result.dtype == call.inputs[0].dtype)


@rule(*_OPS)
@agnostic(*_OPS)
def ordered(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, ..., dim, ...)`` -> results with the dims of ``x``"""
    spelled = letters(call.inputs[0].rank, _dims(call))
    linear = [(0,)] if _keeps_sums(call) else ()
    yield from strategies(call, f"{spelled}->{spelled}", linear=linear)
