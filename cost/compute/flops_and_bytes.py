"""Counts the work of operations: FLOPs, bytes read and written, and the dims of their matrix products.

Every count is a function of the types of operands and results, so it works on global types with symbolic dims as well
as on the shards of one device. :mod:`.op_families` assigns counts to operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

import sympy
import torch

from autopar.ir.node import Dim, TensorType
from autopar.torch_internals.operators import schema_of

Inputs = tuple[TensorType, ...]
Outputs = tuple[TensorType | None, ...]


class Operation(Protocol):
    """A :class:`autopar.ir.node.Node`, or any object with these attributes of a node."""

    @property
    def op(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> tuple[tuple[str, Any], ...]: ...


Count = Callable[[Operation, Inputs, Outputs], Dim]
Matrix = tuple[Dim, Dim, Dim]
Shape = Callable[[Inputs, Outputs], Matrix]


def larger(left: Dim, right: Dim) -> Dim:
    """The larger of two sizes. Of symbolic sizes, the one that is larger for every batch, otherwise a ``Max``."""
    if isinstance(left, int) and isinstance(right, int):
        return left if left > right else right
    ratio = sympy.sympify(left) / right
    if ratio.is_number:
        return left if ratio >= 1 else right
    return sympy.Max(left, right)


def argument(call: Operation, name: str, default: Any = None) -> Any:
    """The argument ``name`` of a call of an ATen operation, by position or keyword."""
    for key, value in call.kwargs:
        if key == name:
            return value
    position = _positions(call.op).get(name)
    return call.args[position] if position is not None and position < len(call.args) else default


@cache
def _positions(op: str) -> Mapping[str, int]:
    """Positions of the arguments of an operation such as ``aten.mm.default``, by name; none for operations that torch
    does not know."""
    namespace, packet, overload = (*op.split("."), "default", "default")[:3]
    operator = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    return {item.name: i for i, item in enumerate(schema_of(operator).arguments)} if operator is not None else {}


# ---- bytes ------------------------------------------------------------


def every_tensor(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """Bytes if each operand is read once and each result written once."""
    total: Dim = 0
    for tensor in inputs:
        total += math.prod(tensor.shape) * tensor.dtype.itemsize
    for result in outputs:
        if result is not None:
            total += math.prod(result.shape) * result.dtype.itemsize
    return total


def results_only(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    return every_tensor(call, (), outputs)


def selected_rows(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """Bytes of a look-up: only the selected rows of the table (operand 0) are read."""
    return every_tensor(call, inputs[1:], outputs) + every_tensor(call, (), outputs)


def written_rows(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """Bytes of rows (the last operand) that are written into a tensor in place: they are read and written once."""
    return 2 * every_tensor(call, inputs[-1:], ())


def draw_passes(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """Bytes of drawing random numbers. They are mixed from 64-bit integers in many small steps, counted here as eight
    reads and writes of each integer, which matches a core's time (10 ns per element). A device that accesses memory in
    each step takes twice that."""
    return 128 * first_result(call, inputs, outputs) + every_tensor(call, (), outputs)


# ---- FLOPs ------------------------------------------------------------


def nothing(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    return 0


def largest_tensor(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    count: Dim = 0
    for tensor in (*inputs, *outputs):
        if tensor is not None:
            count = larger(count, math.prod(tensor.shape))
    return count


def first_result(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    return math.prod(outputs[0].shape) if outputs and outputs[0] is not None else 0


def last_operand(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    return math.prod(inputs[-1].shape) if inputs else 0


def product(left: int, right: int) -> tuple[Count, Shape]:
    """FLOPs and (m, n, k) of ``[..., m, k] @ [..., k, n]``, with operands ``left`` and ``right``. Vectors are matrices
    of one column."""

    def matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
        a, b = inputs[left].shape, inputs[right].shape
        return (a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1, a[-1])

    def flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        b = inputs[right].shape
        return 2 * math.prod(inputs[left].shape) * (b[-1] if len(b) > 1 else 1)

    return flops, matrix


def with_sum(count: Count) -> Count:
    """``count`` and one addition per element of the result."""
    return lambda call, inputs, outputs: count(call, inputs, outputs) + first_result(call, inputs, outputs)


def linear_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """``linear(x [..., k], weight [n, k], bias)``."""
    bias = first_result(call, inputs, outputs) if len(inputs) > 2 else 0
    return 2 * math.prod(inputs[0].shape) * math.prod(inputs[1].shape[:-1]) + bias


def linear_matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
    return math.prod(inputs[0].shape[:-1]), math.prod(inputs[1].shape[:-1]), inputs[0].shape[-1]


def grouped_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """``grouped_mm(a, b, offsets)``. The groups divide the rows of a, the columns of b, or the inner dim; every row is
    computed once. If both operands are batched, it is a plain batched product."""
    a, b = inputs[0].shape, inputs[1].shape
    if len(a) == 3 and len(b) == 2:
        return 2 * math.prod(a[1:]) * b[-1]
    return 2 * math.prod(a) * b[-1]


def grouped_here(products: int) -> Count:
    """``grouped_rows(x, matrices, ends)`` of some of the groups, and its gradients. Groups are assumed to be equally
    long."""

    def flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        x, matrices, ends = (tensor.shape for tensor in inputs[:3])
        return 2 * products * math.prod(x) * matrices[-1] * matrices[0] / ends[0]

    return flops


def grouped_inner_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    x, y, ends = (tensor.shape for tensor in inputs[:3])
    groups = outputs[0].shape[0] if outputs[0] is not None else ends[0]
    return 2 * math.prod(x) * y[-1] * groups / ends[0]


def convolution_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """A convolution multiplies every weight at every position of the output, or of the input if transposed."""
    bias = first_result(call, inputs, outputs) if len(inputs) > 2 else 0
    return _convolution_work(call, inputs[0], inputs[1], outputs[0]) + bias


def _convolution_work(call: Operation, image: TensorType, weight: TensorType, result: TensorType | None) -> Dim:
    positions = image if argument(call, "transposed", False) or result is None else result
    return 2 * positions.shape[0] * math.prod(positions.shape[2:]) * math.prod(weight.shape)


def convolution_matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
    image, weight = inputs[0].shape, inputs[1].shape
    result = outputs[0].shape if outputs[0] is not None else image
    return result[0] * math.prod(result[2:]), weight[0], math.prod(weight[1:])


def convolution_backward_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """``(grad, input, weight)``: as many FLOPs as forward for each requested gradient, and a sum for the bias."""
    grad, image, weight = inputs[:3]
    work = _convolution_work(call, image, weight, grad)
    mask = argument(call, "output_mask", tuple(result is not None for result in outputs))
    return (bool(mask[0]) + bool(mask[1])) * work + (math.prod(grad.shape) if mask[2] else 0)


def convolution_backward_matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
    return convolution_matrix(inputs[1:], (inputs[0],))


def attention(
    first: int, key_products: int, value_products: int, *, shard_of_causal: bool = False
) -> tuple[Count, Shape]:
    """Scaled dot-product attention with query, key and value at operands ``first`` onward, each [batch, heads, length,
    width], and ``key_products`` and ``value_products`` products over the widths of keys and values. Causal attention
    computes half of each product. If its queries are sharded (``shard_of_causal``), the device with the last queries,
    for which the others wait, computes all but half of the square on the diagonal."""

    def flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        query, key, value = (tensor.shape for tensor in inputs[first : first + 3])
        per_product = 1 if argument(call, "is_causal", False) else 2
        widths = key_products * query[-1] + value_products * value[-1]
        return per_product * math.prod(query[:-1]) * key[-2] * widths

    def last(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        query, key, value = (tensor.shape for tensor in inputs[first : first + 3])
        widths = key_products * query[-1] + value_products * value[-1]
        return math.prod(query[:-1]) * (2 * key[-2] - query[-2]) * widths

    def matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
        return inputs[first].shape[-2], inputs[first + 1].shape[-2], inputs[first].shape[-1]

    return (last if shard_of_causal else flops), matrix
