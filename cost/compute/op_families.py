"""The family of every operation, which determines how its work is counted (:mod:`.flops_and_bytes`).

Operations are looked up by name without namespace and overload (``aten.mm.default`` is ``mm``; a local form such as
``autopar.masked_embedding`` is ``embedding``). An operation that is in no table counts as one FLOP per element of its
largest tensor, and reads and writes each tensor once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from autopar.ir.node import PLACEHOLDERS

from .expert_blocks import ExpertBlock
from .flops_and_bytes import (
    Count,
    Shape,
    attention,
    convolution_backward_flops,
    convolution_backward_matrix,
    convolution_flops,
    convolution_matrix,
    draw_passes,
    every_tensor,
    first_result,
    grouped_flops,
    grouped_here,
    grouped_inner_flops,
    largest_tensor,
    last_operand,
    linear_flops,
    linear_matrix,
    nothing,
    product,
    results_only,
    selected_rows,
    with_sum,
    written_rows,
)


@dataclass(frozen=True, slots=True)
class Family:
    """How operations of one family are counted. ``matrix`` returns the (m, n, k) of the matrix products of an
    operation; ``block``: what else is counted of a block of experts. ``is_function``: they evaluate a transcendental
    function for each element of their largest tensor. ``is_view``: they move no data. ``is_free``: they are
    placeholders, which do not run."""

    flops: Count
    bytes: Count
    matrix: Shape | None = None
    block: ExpertBlock | None = None
    is_view: bool = False
    is_free: bool = False
    is_attention: bool = False
    is_function: bool = False


def _experts(block: ExpertBlock) -> Family:
    return Family(block.flops, block.bytes, block.matrix, block)


_MM, _MM_SHAPE = product(0, 1)
_ADDMM, _ADDMM_SHAPE = product(1, 2)
_SDPA, _SDPA_SHAPE = attention(0, 1, 1)
_SDPA_BACKWARD, _SDPA_BACKWARD_SHAPE = attention(1, 3, 2)
_CAUSAL, _ = attention(0, 1, 1, shard_of_causal=True)
_CAUSAL_BACKWARD, _ = attention(1, 3, 2, shard_of_causal=True)

DEFAULT = Family(largest_tensor, every_tensor)
POINTWISE = Family(first_result, every_tensor)
FUNCTION = Family(largest_tensor, every_tensor, is_function=True)
VIEW = Family(nothing, nothing, is_view=True)
FREE = Family(nothing, nothing, is_view=True, is_free=True)
MOVE = Family(nothing, every_tensor)
FILL = Family(nothing, results_only)
SELECT = Family(nothing, selected_rows)
WRITE = Family(nothing, written_rows)
DRAW = Family(first_result, draw_passes)
ACCUMULATE = Family(last_operand, every_tensor)
MATMUL = Family(_MM, every_tensor, _MM_SHAPE)
ADDED_MATMUL = Family(with_sum(_ADDMM), every_tensor, _ADDMM_SHAPE)
LINEAR = Family(linear_flops, every_tensor, linear_matrix)
GROUPED_MATMUL = Family(grouped_flops, every_tensor, _MM_SHAPE)
GROUPED_ROWS = Family(grouped_here(1), every_tensor, _MM_SHAPE)
GROUPED_INNER = Family(grouped_inner_flops, every_tensor, _MM_SHAPE)
GROUPED_BACKWARD = Family(grouped_here(2), every_tensor, _MM_SHAPE)
CONVOLUTION = Family(convolution_flops, every_tensor, convolution_matrix)
CONVOLUTION_BACKWARD = Family(convolution_backward_flops, every_tensor, convolution_backward_matrix)
ATTENTION = Family(_SDPA, every_tensor, _SDPA_SHAPE, is_attention=True)
ATTENTION_BACKWARD = Family(_SDPA_BACKWARD, every_tensor, _SDPA_BACKWARD_SHAPE, is_attention=True)
EXPERTS = _experts(ExpertBlock(backward=False))
EXPERTS_BACKWARD = _experts(ExpertBlock(backward=True))
EXCHANGED_EXPERTS = _experts(ExpertBlock(backward=False, exchanged=True))
EXCHANGED_EXPERTS_BACKWARD = _experts(ExpertBlock(backward=True, exchanged=True))
CAUSAL_SHARD = Family(_CAUSAL, every_tensor, _SDPA_SHAPE, is_attention=True)
CAUSAL_SHARD_BACKWARD = Family(_CAUSAL_BACKWARD, every_tensor, _SDPA_BACKWARD_SHAPE, is_attention=True)

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
    (WRITE, "write_rows"),
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
    (ATTENTION, "attention scaled_dot_product_attention"),
    (ATTENTION_BACKWARD, "attention_backward"),
    (EXPERTS, "experts some_experts"),
    (EXPERTS_BACKWARD, "experts_backward some_experts_backward"),
    (EXCHANGED_EXPERTS, "exchanged_experts"),
    (EXCHANGED_EXPERTS_BACKWARD, "exchanged_experts_backward"),
    (CAUSAL_SHARD, "causal_attention"),
    (CAUSAL_SHARD_BACKWARD, "causal_attention_backward"),
)
FAMILIES: Mapping[str, Family] = {name: family for family, names in _NAMES for name in names.split()}


@cache
def family_of(op: str) -> Family:
    """The family of an operation by its overload name. For operations that are in no table, :data:`POINTWISE` if torch
    tags them so, otherwise :data:`DEFAULT`."""
    namespace, _, rest = op.partition(".")
    name = rest.partition(".")[0] if rest else namespace
    if namespace == "autopar":
        name = name.removeprefix("masked_") if name not in FAMILIES else name
    if name in FAMILIES:
        return FAMILIES[name]
    operator = (
        getattr(getattr(torch.ops.aten, name, None), op.rpartition(".")[2], None) if namespace == "aten" else None
    )
    return POINTWISE if operator is not None and torch.Tag.pointwise in operator.tags else DEFAULT
