"""Reductions over some dims (by default all); the other dims can be sharded.

The tables group operations by the result of reducing a sharded dim: ``Partial(sum)``, ``Partial(max)``,
``Partial(min)``, or no placement, so that the dim must be whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial

from autopar.ir.placements import PARTIAL_SUM, AxisStrategy, Placement
from autopar.passes.rule_language.dimension_strings import WHOLE, agnostic, letters, strategies, without
from autopar.passes.rule_language.registry import OpCall, rule

# Name -> the position of the dims argument, -1 if there is none; the argument after it is keepdim.
_SUMS = {
    "sum.default": -1,
    "sum.dim_IntList": 1,
    "nansum.default": 1,
    "count_nonzero.dim_IntList": 1,
}
# As above.
_LARGEST = {"amax.default": 1, "max.default": -1}
# As above.
_SMALLEST = {"amin.default": 1, "min.default": -1}
# As above; -2: a keyword.
_WHOLE = {
    "mean.default": -1,
    "mean.dim": 1,
    "prod.dim_int": 1,
    "any.dim": 1,
    "any.dims": 1,
    "all.dim": 1,
    "all.dims": 1,
    "max.dim": 1,
    "min.dim": 1,
    "argmax.default": 1,
    "argmin.default": 1,
    "aminmax.default": -2,
    "var.correction": 1,
    "std.correction": 1,
    "var.dim": 1,
    "std.dim": 1,
    "var_mean.correction": 1,
    "std_mean.correction": 1,
    "linalg_vector_norm.default": 2,
    "norm.ScalarOpt_dim": 2,
    "norm.ScalarOpt_dim_dtype": 2,
    "median.dim": 1,
    "nanmedian.dim": 1,
    "mode.default": 1,
    "kthvalue.default": 2,
}
_LINEAR = ("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim")
# By default kthvalue and mode reduce the last dim; the others reduce all dims.
_LAST_BY_DEFAULT = ("aten.kthvalue.default", "aten.mode.default")
_POSITIONS = {f"aten.{name}": at for table in (_SUMS, _LARGEST, _SMALLEST, _WHOLE) for name, at in table.items()}


def _leaves(op: str) -> Placement | None:
    """The placement of the result if a sharded dim is reduced; None: reduced dims must not be sharded."""
    name = op.removeprefix("aten.")
    if name in _SUMS:
        return PARTIAL_SUM
    return Partial("max") if name in _LARGEST else Partial("min") if name in _SMALLEST else None


def _reduced(call: OpCall) -> set[int]:
    position, rank = _POSITIONS[call.op], call.inputs[0].rank
    # count_nonzero, var and the like call it "dim" even where it may be a list.
    dims = call.arg(position, "dim") if position >= 0 else dict(call.kwargs).get("dim")
    if dims is None and call.op in _LAST_BY_DEFAULT:
        dims = -1
    if dims is None or dims == ():
        return set(range(rank))
    return {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims)} if rank else set()


def _keeps_dims(call: OpCall) -> bool:
    return all(t is None or t.rank == call.inputs[0].rank for t in call.outputs)


def _takes_partial(call: OpCall) -> bool:
    """Whether the operation is linear, and not a sum of integers that may wrap in a narrow dtype before the reduction
    widens it."""
    result, operand = call.outputs[0], call.inputs[0].dtype
    assert result is not None
    return call.op in _LINEAR and (result.dtype.is_floating_point or result.dtype.is_complex or result.dtype == operand)


@rule(*_POSITIONS)
@agnostic(*_POSITIONS)
def reduction(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dims, keepdim, ...)`` -> one or more results of the same shape"""
    spelled, reduced = letters(call.inputs[0].rank), _reduced(call)
    kept = "".join(WHOLE if dim in reduced else letter for dim, letter in enumerate(spelled))
    result = kept if _keeps_dims(call) else without(spelled, reduced)
    linear = [(0,)] if _takes_partial(call) else ()
    yield from strategies(call, f"{spelled}->{result}", linear=linear, contracted=_leaves(call.op))
