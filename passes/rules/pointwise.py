"""Elementwise operations: every dim of the result can be sharded; operands that broadcast along it stay whole.

Elementwise are the operations with torch's tag ``pointwise``, and a table of those that lack it. Random ones are
excluded, since each device would draw its own numbers. ``_LINEAR`` lists, by argument name, the operands in which an
operation is jointly linear, so that a Partial(sum) passes through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

from autopar.ir.node import TensorType
from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.dimension_strings import WHOLE, agnostic, letters, strategies
from autopar.passes.rule_language.registry import OpCall, Operand, rule
from autopar.torch_internals.operators import is_mutable, registered_names, schema_of

_UNTAGGED = (
    "__and__.Scalar",
    "__and__.Tensor",
    "__or__.Scalar",
    "__or__.Tensor",
    "_conj.default",
    "_prelu_kernel.default",
    "_prelu_kernel_backward.default",
    "_to_copy.default",
    "alias.default",
    "alias_copy.default",
    "complex.default",
    "copy.default",
    "detach.default",
    "detach_copy.default",
    "elu_backward.default",
    "fill.Scalar",
    "fill.Tensor",
    "floor_divide.Scalar",
    "floor_divide.default",
    "hardshrink_backward.default",
    "hardsigmoid_backward.default",
    "hardswish.default",
    "hardswish_backward.default",
    "hardtanh_backward.default",
    "isclose.default",
    "leaky_relu_backward.default",
    "lift_fresh_copy.default",
    "log_sigmoid_backward.default",
    "log_sigmoid_forward.default",
    "masked_fill.Tensor",
    "mish_backward.default",
    "polar.default",
    "rrelu_with_noise_backward.default",
    "rsub.Tensor",
    "softplus_backward.default",
    "softshrink_backward.default",
    "where.Scalar",
    "where.ScalarOther",
    "where.ScalarSelf",
)
_NOT_POINTWISE = ("equal.default",)

_UNARY_LINEAR = (
    "neg.default",
    "positive.default",
    "alias.default",
    "alias_copy.default",
    "detach.default",
    "detach_copy.default",
    "clone.default",
    "lift_fresh_copy.default",
    "_to_copy.default",
    "_conj.default",
    "_conj_physical.default",
    "conj_physical.default",
    "deg2rad.default",
    "rad2deg.default",
    "mul.Scalar",
    "div.Scalar",
    "div.Tensor",
    "true_divide.Tensor",
    "masked_fill.Scalar",
)
# Sets of arguments, by name, that may be Partial together; "|" separates alternatives.
_LINEAR: Mapping[str, str] = {
    **dict.fromkeys(_UNARY_LINEAR, "self"),
    **dict.fromkeys(("add.Tensor", "sub.Tensor", "rsub.Tensor", "where.self"), "self other"),
    "mul.Tensor": "self|other",
    "lerp.Scalar": "self end",
    "lerp.Tensor": "self end",
    "addcmul.default": "self tensor1|self tensor2",
    "addcdiv.default": "self tensor1",
    "masked_fill.Tensor": "self value",
    "copy.default": "src",
    "fill.Tensor": "value",
    "complex.default": "real imag",
    "polar.default": "abs",
}
# The names of operations that change an operand in place, or write to one that is given.
_WRITES = re.compile(r"[^_]_(\.|$)|\.(\w+_)?out(_|$)")
_GRADIENTS = ("grad_output", "grad")


def _overload(name: str) -> Any:
    """The ATen operation of that name, such as ``add.Tensor``; None if this version of torch lacks it."""
    base, _, overload = name.partition(".")
    try:
        return getattr(getattr(torch.ops.aten, base), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def _is_functional(operation: Any) -> bool:
    """Whether an operation is a deterministic function of single tensors that returns new ones."""
    kinds = {str(a.type).removeprefix("Optional[").removesuffix("]") for a in schema_of(operation).arguments}
    plain = "List[Tensor" not in "".join(kinds)
    return plain and not is_mutable(operation) and torch.Tag.nondeterministic_seeded not in operation.tags


def _pointwise_names() -> Iterator[str]:
    registered = (name.removeprefix("aten::") for name in registered_names() if "aten::" in name)
    for name in sorted({*registered, *_UNTAGGED}):
        # Most operations are ruled out here by their names, and most others by their tags: reading schemas is slow.
        operation = None if _WRITES.search(name) else _overload(name)
        if operation is None:
            continue
        full = str(operation).removeprefix("aten.")
        is_pointwise = torch.Tag.pointwise in operation.tags and full not in _NOT_POINTWISE
        if (full in _UNTAGGED or is_pointwise) and _is_functional(operation):
            yield f"aten.{full}"


POINTWISE = tuple(dict.fromkeys(_pointwise_names()))
"""The elementwise operations, by name."""


@cache
def _argument_names(op: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in schema_of(_overload(op.removeprefix("aten."))).arguments)


def _operands_by_name(call: OpCall) -> dict[str, int]:
    """The operand index of every argument that is a tensor."""
    named = {**dict(zip(_argument_names(call.op), call.args, strict=False)), **dict(call.kwargs)}
    return {name: arg.index for name, arg in named.items() if isinstance(arg, Operand)}


def _linear_sets(call: OpCall) -> list[list[int]]:
    """The sets of operands, by index, in which this call is linear."""
    table = _LINEAR.get(call.op.removeprefix("aten."))
    names = _argument_names(call.op)
    if table is None and call.op.partition(".")[2].partition(".")[0].endswith("_backward"):
        table = next((name for name in _GRADIENTS if name in names), None)
    if call.op == "aten.masked_fill.Scalar" and call.arg(2, "value") != 0:
        return []
    by_name = _operands_by_name(call)
    sets = [alternative.split() for alternative in (table or "").split("|") if alternative]
    return [[by_name[n] for n in s] for s in sets if all(n in by_name for n in s) and _sums_survive(call, s, by_name)]


def _sums_survive(call: OpCall, names: list[str], operands: Mapping[str, int]) -> bool:
    """Whether summing commutes with converting to the dtype of the result: narrow integers may wrap."""
    result = call.outputs[0]
    assert result is not None
    exact = result.dtype.is_floating_point or result.dtype.is_complex
    return all(exact or call.inputs[operands[n]].dtype == result.dtype for n in names)


def _spell(tensor: TensorType | None, shape: tuple[int, ...]) -> str:
    """The letters of a tensor that broadcasts to ``shape``; a tensor that does not (scratch memory) stays whole."""
    if tensor is None:
        return ""
    own = tuple(int(size) for size in tensor.shape)
    spelled = letters(len(shape))[len(shape) - len(own) :] if len(own) <= len(shape) else ""
    fits = spelled and all(a in (1, b) for a, b in zip(own[::-1], shape[::-1], strict=False))
    return spelled if fits else WHOLE * len(own)


@rule(*POINTWISE)
@agnostic(*POINTWISE)
def pointwise(call: OpCall) -> Iterator[AxisStrategy]:
    """``(a, b, ...)`` -> their common shape; see the module docstring."""
    result = call.outputs[0]
    if result is None:
        return
    shape = tuple(int(size) for size in result.shape)
    operands = ",".join(_spell(tensor, shape) for tensor in call.inputs)
    results = ",".join(_spell(tensor, shape) for tensor in call.outputs)
    yield from strategies(call, f"{operands}->{results}", linear=_linear_sets(call), contracted=None)
