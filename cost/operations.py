"""What each operation works: floating-point operations and bytes read and written, by family of operations.

Everything is a function of the types of operands and results, so it serves global types with symbolic dims as
well as the shards of one device. Operations are looked up by name without namespace and overload
(``aten.mm.default`` is ``mm``; a local form such as ``autopar.masked_embedding`` is ``embedding``); one that
is in no table counts one FLOP per element of its largest tensor and reads and writes each tensor once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import sympy
import torch

from autopar.graph import PLACEHOLDERS, Dim, TensorType

Inputs = tuple[TensorType, ...]
Outputs = tuple[TensorType | None, ...]


class Operation(Protocol):
    """A :class:`autopar.graph.Node`, or anything that says as much of one."""

    @property
    def op(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> tuple[tuple[str, Any], ...]: ...


Count = Callable[[Operation, Inputs, Outputs], Dim]
Matrix = tuple[Dim, Dim, Dim]


@dataclass(frozen=True, slots=True)
class Family:
    """How operations of one family are counted. ``matrix`` gives the (m, n, k) of the matrix products that an
    operation consists of; ``is_function`` ones evaluate a transcendental function for each element of their largest
    tensor; ``is_view`` ones move nothing, ``is_free`` ones (placeholders) do not even run."""

    flops: Count
    bytes: Count
    matrix: Callable[[Inputs, Outputs], Matrix] | None = None
    is_view: bool = False
    is_free: bool = False
    is_attention: bool = False
    is_function: bool = False


def larger(left: Dim, right: Dim) -> Dim:
    """The larger of two sizes; of symbolic ones the one that is larger for every batch, else a ``Max``."""
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
    """Positions of the arguments of ``aten.mm.default`` by name; none for operations torch does not know."""
    namespace, packet, overload = (*op.split("."), "default", "default")[:3]
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    return {item.name: i for i, item in enumerate(found._schema.arguments)} if found is not None else {}


# ---- bytes ------------------------------------------------------------


def _every_tensor(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """Each operand read once, each result written once."""
    total: Dim = 0
    for tensor in inputs:
        total += math.prod(tensor.shape) * tensor.dtype.itemsize
    for result in outputs:
        if result is not None:
            total += math.prod(result.shape) * result.dtype.itemsize
    return total


def _results_only(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    return _every_tensor(call, (), outputs)


def _selected_rows(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """Of the table (operand 0) only what comes out is read."""
    return _every_tensor(call, inputs[1:], outputs) + _every_tensor(call, (), outputs)


def _passes(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """Random numbers are mixed from 64-bit integers in many small steps, here counted as eight reads and writes of
    each: what a core takes (10 ns an element). A device that goes through memory for each step takes twice that."""
    return 128 * _first_result(call, inputs, outputs) + _every_tensor(call, (), outputs)


# ---- FLOPs ------------------------------------------------------------


def _nothing(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    return 0


def _largest_tensor(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    count: Dim = 0
    for tensor in (*inputs, *outputs):
        if tensor is not None:
            count = larger(count, math.prod(tensor.shape))
    return count


def _first_result(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    return math.prod(outputs[0].shape) if outputs and outputs[0] is not None else 0


def _last_operand(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    return math.prod(inputs[-1].shape) if inputs else 0


def _product(left: int, right: int) -> tuple[Count, Callable[[Inputs, Outputs], Matrix]]:
    """FLOPs and (m, n, k) of ``[..., m, k] @ [..., k, n]``, operands ``left`` and ``right``; vectors are
    matrices of one column."""

    def matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
        a, b = inputs[left].shape, inputs[right].shape
        return (a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1, a[-1])

    def flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        b = inputs[right].shape
        return 2 * math.prod(inputs[left].shape) * (b[-1] if len(b) > 1 else 1)

    return flops, matrix


def _with_sum(count: Count) -> Count:
    """``count`` and one addition per element of the result."""
    return lambda call, inputs, outputs: count(call, inputs, outputs) + _first_result(call, inputs, outputs)


def _linear_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """``linear(x [..., k], weight [n, k], bias)``."""
    bias = _first_result(call, inputs, outputs) if len(inputs) > 2 else 0
    return 2 * math.prod(inputs[0].shape) * math.prod(inputs[1].shape[:-1]) + bias


def _linear_matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
    return math.prod(inputs[0].shape[:-1]), math.prod(inputs[1].shape[:-1]), inputs[0].shape[-1]


def _grouped_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """``grouped_mm(a, b, offsets)``: the groups split the rows of a, the columns of b, or the inner dim;
    every row of work is done once. With both operands batched it is a plain batched product."""
    a, b = inputs[0].shape, inputs[1].shape
    if len(a) == 3 and len(b) == 2:
        return 2 * math.prod(a[1:]) * b[-1]
    return 2 * math.prod(a) * b[-1]


def _grouped_here(products: int) -> Count:
    """``grouped_rows(x, matrices, ends)`` of some of the groups, taken to be equally long, and its gradients."""

    def flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        x, matrices, ends = (tensor.shape for tensor in inputs[:3])
        return 2 * products * math.prod(x) * matrices[-1] * matrices[0] / ends[0]

    return flops


def _grouped_inner_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    x, y, ends = (tensor.shape for tensor in inputs[:3])
    groups = outputs[0].shape[0] if outputs[0] is not None else ends[0]
    return 2 * math.prod(x) * y[-1] * groups / ends[0]


def _convolution_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """Every weight meets every position: of the output, or of the input if transposed."""
    bias = _first_result(call, inputs, outputs) if len(inputs) > 2 else 0
    return _convolution_work(call, inputs[0], inputs[1], outputs[0]) + bias


def _convolution_work(call: Operation, image: TensorType, weight: TensorType, result: TensorType | None) -> Dim:
    positions = image if argument(call, "transposed", False) or result is None else result
    return 2 * positions.shape[0] * math.prod(positions.shape[2:]) * math.prod(weight.shape)


def _convolution_matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
    image, weight = inputs[0].shape, inputs[1].shape
    result = outputs[0].shape if outputs[0] is not None else image
    return result[0] * math.prod(result[2:]), weight[0], math.prod(weight[1:])


def _convolution_backward_flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
    """``(grad, input, weight)``: as much as forward for each gradient asked for, and a sum for the bias."""
    grad, image, weight = inputs[:3]
    work = _convolution_work(call, image, weight, grad)
    asked = argument(call, "output_mask", tuple(result is not None for result in outputs))
    return (bool(asked[0]) + bool(asked[1])) * work + (math.prod(grad.shape) if asked[2] else 0)


def _convolution_backward_matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
    return _convolution_matrix(inputs[1:], (inputs[0],))


def _attention(
    first: int, key_products: int, value_products: int, *, shard_of_causal: bool = False
) -> tuple[Count, Callable[[Inputs, Outputs], Matrix]]:
    """Scaled dot-product attention with query, key, value at operands ``first`` onward, each [batch, heads,
    length, width]: so many products over the width of the keys and of the values. Causal attention computes
    half of each; on a shard of its queries the device with the last ones, for which others wait, all but half of the
    square on the diagonal."""

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


def _experts(tokens: int, products: int) -> tuple[Count, Count, Callable[[Inputs, Outputs], Matrix]]:
    """FLOPs, bytes and (m, n, k) of a mixture-of-experts block: tokens at operand ``tokens``, then ids, weights and the
    two matrices of the experts held here; ``products`` with each matrix. Every expert is taken to be chosen equally
    often, so that a device does its share of the rows."""

    def share(call: Operation, inputs: Inputs) -> Dim:
        held, count = inputs[tokens + 3].shape[0], call.args[-2]
        rows = math.prod(inputs[tokens + 1].shape)
        return rows * held // count if isinstance(rows, int) and isinstance(held, int) else rows * held / count

    def flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        up, down = inputs[tokens + 3].shape, inputs[tokens + 4].shape
        return 2 * products * share(call, inputs) * (math.prod(up[1:]) + math.prod(down[1:]))

    def nbytes(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        x, up, down = inputs[tokens], inputs[tokens + 3].shape, inputs[tokens + 4].shape
        rows = share(call, inputs) * (2 * up[1] + 2 * down[2] + 2 * down[1]) * products * x.dtype.itemsize
        return _every_tensor(call, inputs, outputs) + rows

    def matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
        up = inputs[tokens + 3].shape
        return math.prod(inputs[tokens + 1].shape), up[1], up[2]

    return flops, nbytes, matrix


_MM, _MM_SHAPE = _product(0, 1)
_ADDMM, _ADDMM_SHAPE = _product(1, 2)
_SDPA, _SDPA_SHAPE = _attention(0, 1, 1)
_SDPA_BACKWARD, _SDPA_BACKWARD_SHAPE = _attention(1, 3, 2)
_CAUSAL, _ = _attention(0, 1, 1, shard_of_causal=True)
_CAUSAL_BACKWARD, _ = _attention(1, 3, 2, shard_of_causal=True)

DEFAULT = Family(_largest_tensor, _every_tensor)
POINTWISE = Family(_first_result, _every_tensor)
FUNCTION = Family(_largest_tensor, _every_tensor, is_function=True)
VIEW = Family(_nothing, _nothing, is_view=True)
FREE = Family(_nothing, _nothing, is_view=True, is_free=True)
MOVE = Family(_nothing, _every_tensor)
FILL = Family(_nothing, _results_only)
SELECT = Family(_nothing, _selected_rows)
DRAW = Family(_first_result, _passes)
ACCUMULATE = Family(_last_operand, _every_tensor)
MATMUL = Family(_MM, _every_tensor, _MM_SHAPE)
ADDED_MATMUL = Family(_with_sum(_ADDMM), _every_tensor, _ADDMM_SHAPE)
LINEAR = Family(_linear_flops, _every_tensor, _linear_matrix)
GROUPED_MATMUL = Family(_grouped_flops, _every_tensor, _MM_SHAPE)
GROUPED_ROWS = Family(_grouped_here(1), _every_tensor, _MM_SHAPE)
GROUPED_INNER = Family(_grouped_inner_flops, _every_tensor, _MM_SHAPE)
GROUPED_BACKWARD = Family(_grouped_here(2), _every_tensor, _MM_SHAPE)
CONVOLUTION = Family(_convolution_flops, _every_tensor, _convolution_matrix)
CONVOLUTION_BACKWARD = Family(_convolution_backward_flops, _every_tensor, _convolution_backward_matrix)
ATTENTION = Family(_SDPA, _every_tensor, _SDPA_SHAPE, is_attention=True)
ATTENTION_BACKWARD = Family(_SDPA_BACKWARD, _every_tensor, _SDPA_BACKWARD_SHAPE, is_attention=True)
EXPERTS = Family(*_experts(0, 1))
EXPERTS_BACKWARD = Family(*_experts(1, 3))
CAUSAL_SHARD = Family(_CAUSAL, _every_tensor, _SDPA_SHAPE, is_attention=True)
CAUSAL_SHARD_BACKWARD = Family(_CAUSAL_BACKWARD, _every_tensor, _SDPA_BACKWARD_SHAPE, is_attention=True)

_NAMES: tuple[tuple[Family, str], ...] = (
    (FREE, " ".join(PLACEHOLDERS)),
    (
        VIEW,
        """
        view _unsafe_view reshape _reshape_alias view_as view_as_real view_as_complex flatten unflatten
        expand expand_as squeeze unsqueeze transpose t permute swapaxes movedim numpy_T
        slice select narrow split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unbind
        diagonal as_strided unfold detach alias lift lift_fresh real imag conj _conj positive
        empty empty_like empty_strided empty_permuted new_empty new_empty_strided
        sym_size sym_numel sym_stride
        """,
    ),
    (
        FILL,
        """
        full full_like fill zeros zeros_like zero ones ones_like new_zeros new_ones new_full scalar_tensor
        arange linspace eye tril_indices triu_indices
        rand rand_like randn randn_like randint randint_like randperm
        """,
    ),
    (
        MOVE,
        """
        clone copy contiguous _to_copy to cat stack repeat repeat_interleave flip roll rot90 tril triu
        constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d
        scatter scatter_value masked_scatter index_put _unsafe_index_put index_copy index_fill
        slice_scatter select_scatter diagonal_scatter
        slice_backward select_backward diagonal_backward unfold_backward
        embedding_backward embedding_dense_backward
        pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im
        """,
    ),
    (
        FUNCTION,
        """
        exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
        erf erfc erfinv lgamma digamma sigmoid logit log_sigmoid log_sigmoid_forward log_sigmoid_backward
        gelu gelu_backward silu silu_backward mish mish_backward softplus softplus_backward elu selu celu
        _softmax _log_softmax _log_softmax_backward_data softmax log_softmax logsumexp
        """,
    ),
    (SELECT, "embedding gather index index_select _unsafe_index take take_along_dim"),
    (DRAW, "uniform normal bernoulli random_bits"),
    (ACCUMULATE, "scatter_add scatter_reduce index_add index_reduce"),
    (MATMUL, "mm bmm matmul mv dot vdot _scaled_mm _int_mm"),
    (ADDED_MATMUL, "addmm baddbmm addmv _addmm_activation"),
    (LINEAR, "linear _linear_pointwise"),
    (GROUPED_MATMUL, "_grouped_mm grouped_mm _scaled_grouped_mm grouped_mm_fallback"),
    (GROUPED_ROWS, "grouped_rows"),
    (GROUPED_INNER, "grouped_inner"),
    (GROUPED_BACKWARD, "grouped_backward grouped_mm_fallback_backward"),
    (
        CONVOLUTION,
        """
        convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution
        conv1d conv2d conv3d
        """,
    ),
    (CONVOLUTION_BACKWARD, "convolution_backward convolution_backward_overrideable"),
    (
        ATTENTION,
        """
        scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable
        """,
    ),
    (
        ATTENTION_BACKWARD,
        """
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward
        """,
    ),
    (EXPERTS, "experts some_experts"),
    (EXPERTS_BACKWARD, "experts_backward some_experts_backward"),
    (CAUSAL_SHARD, "causal_attention"),
    (CAUSAL_SHARD_BACKWARD, "causal_attention_backward"),
)
FAMILIES: Mapping[str, Family] = {name: family for family, names in _NAMES for name in names.split()}


@cache
def family_of(op: str) -> Family:
    """The family of an operation by its overload name; by torch's own tag for pointwise ones, else
    :data:`DEFAULT`."""
    namespace, _, rest = op.partition(".")
    name = rest.partition(".")[0] if rest else namespace
    if namespace == "autopar":
        name = name.removeprefix("masked_") if name not in FAMILIES else name
    if name in FAMILIES:
        return FAMILIES[name]
    found = getattr(getattr(torch.ops.aten, name, None), op.rpartition(".")[2], None) if namespace == "aten" else None
    return POINTWISE if found is not None and torch.Tag.pointwise in found.tags else DEFAULT
