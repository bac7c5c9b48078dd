"""Kernels of scaled dot-product attention: one for each kind of device, behind one signature.

A graph has :mod:`autopar.ops.attention`, which is the same for every device. What runs is chosen here, by the device
and the dtype of the query, when the operation runs:

=================  ============================================  ================================================
kernel             runs on                                       takes
=================  ============================================  ================================================
``processor``      CPU                                           every floating dtype, masks
``flash``          CUDA, compute capability 8.0 and above        16-bit, no mask, heads of at most 256, causal only
                                                                 with as many keys as queries
``efficient``      CUDA                                          float32, float16, bfloat16 from 8.0 on, masks
``written_out``    everything else                               every floating dtype, masks
``shapes``         meta                                          everything; gives tensors without data
=================  ============================================  ================================================

Within :func:`kernels_of` tensors on the meta device are taken for ones of another, whose kernel then runs on them: so
whoever counts bytes sees what it allocates around the product, for masks, wide rows and repeated heads.

A causal mask is aligned with the first query and the first key. FlashAttention aligns it with the last ones, which is
the same only where there are as many.

Key and value may have fewer heads than the query (grouped queries). The ``efficient`` and ``written_out`` kernels take
as many, so there each head is repeated for its group and its gradients are summed.

Each gives the output and the log-sum-exps [..., L] of the rows of scores, from which its backward computes the
probabilities again (FlashAttention-2, Dao 2023, section 3.1); so a backward may run another kernel than its forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.torch_internals.operators import cpu_attention

aten = torch.ops.aten

# The widest heads that FlashAttention's kernels are built for (FlashAttention-2, Dao 2023, section 4).
_FLASH_WIDTH = 256
# The oldest GPU that they are built for: Ampere (FlashAttention-2, Dao 2023, section 4).
_FLASH_CAPABILITY = (8, 0)
# GPUs on which FlashAttention does not train with heads wider than 192 and up to 224 (torch's `sdp_utils.cpp`,
# `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`).
_NARROW_CAPABILITIES, _NARROW_WIDTHS = ((8, 6), (8, 9), (12, 0), (12, 1)), range(193, 225)
# The kernels for CUDA load 16 bytes at a time, eight 16-bit elements (torch's `sdp_utils.cpp`, `pad_last_dim<8>`).
_WIDTH_MULTIPLE = 8
# Rows of a mask are aligned to so many elements for the memory-efficient kernel (torch's `pad_bias<16>`).
_MASK_MULTIPLE = 16
# The memory-efficient kernel stores log-sum-exps for whole blocks of this many queries (torch's `kAlignLSE`).
_EFFICIENT_BLOCK = 32

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class Kernel:
    """``forward(query, key, value, mask, causal, scale)`` and ``backward(grad, query, key, value, out, logsumexp, mask,
    causal, scale)``. The last dims of operands other than the mask are contiguous."""

    name: str
    forward: Forward
    backward: Backward


# The kind of device for which tensors on the meta device are taken.
_meant: ContextVar[str] = ContextVar("_meant", default="meta")


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Within, attention of tensors on the meta device runs the kernel of a ``device`` such as "cuda"."""
    token = _meant.set(device)
    try:
        yield
    finally:
        _meant.reset(token)


def kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Kernel:
    """The kernel that runs attention of such operands. See the module's table."""
    on_meta = query.device.type == "meta"
    device = _meant.get() if on_meta else query.device.type
    if device == "meta":
        return SHAPES
    if query.shape[-1] != value.shape[-1]:
        return WRITTEN_OUT
    if device == "cpu":
        return SHAPES if on_meta else PROCESSOR
    if device != "cuda" or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return WRITTEN_OUT
    capability = _capability(query.device)
    if query.dtype == torch.bfloat16 and capability < _FLASH_CAPABILITY:
        return WRITTEN_OUT
    square = not causal or query.shape[-2] == key.shape[-2]
    return FLASH if mask is None and square and _flash_takes(query, capability) else EFFICIENT


def _flash_takes(query: Tensor, capability: tuple[int, int]) -> bool:
    width = query.shape[-1]
    trains = capability not in _NARROW_CAPABILITIES or width not in _NARROW_WIDTHS
    return query.dtype.itemsize == 2 and width <= _FLASH_WIDTH and capability >= _FLASH_CAPABILITY and trains


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; of what is no GPU that is here, as in a rehearsal or a plan, that of a current one."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if here else _FLASH_CAPABILITY


def _processor(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return cpu_attention(query, key, value, mask, causal, scale)


def _processor_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    grad_query, grad_key, grad_value = kernel(
        grad, query, key, value, out, logsumexp, 0.0, causal, attn_mask=mask, scale=scale
    )
    return grad_query, grad_key, grad_value


def _flash(
    query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    width = value.shape[-1]
    query, key, value = map(_whole_loads, (query, key, value))
    results = aten._scaled_dot_product_flash_attention.default(query, key, value, 0.0, causal, False, scale=scale)
    return _first(results[0], width), results[1]


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, _mask: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width, lengths = query.shape[-1], (query.shape[-2], key.shape[-2])
    grad, query, key, value, out = map(_whole_loads, (grad, query, key, value, out))
    # Without dropout no random state is read. Offsets of ragged sequences must be absent: even empty ones would choose
    # the kernel for these.
    unread, sums = query.new_empty(0, dtype=torch.int64), logsumexp.contiguous()
    gradients = aten._scaled_dot_product_flash_attention_backward.default(
        grad, query, key, value, out, sums, None, None, *lengths, 0.0, causal, unread, unread, scale=scale
    )
    grad_query, grad_key, grad_value = (_first(gradient, width) for gradient in gradients)
    return grad_query, grad_key, grad_value


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    width, bias = value.shape[-1], _bias(mask, query, key)
    padded = map(_whole_loads, (query, _each_head(key, query), _each_head(value, query)))
    out, logsumexp, _, _ = aten._scaled_dot_product_efficient_attention.default(
        *padded, bias, True, 0.0, causal, scale=scale
    )
    return _first(out, width), _first(logsumexp, query.shape[-2])


def _efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    widths, bias = (query.shape[-1], key.shape[-1], value.shape[-1]), _bias(mask, query, key)
    heads = key.shape[-3]
    key, value = _each_head(key, query), _each_head(value, query)
    # Rows beyond the last query have probabilities of zero.
    logsumexp = F.pad(logsumexp, (0, -query.shape[-2] % _EFFICIENT_BLOCK), value=math.inf)
    grad, query, key, value, out = map(_whole_loads, (grad, query, key, value, out))
    # The kernel reads the output as if it lay as [B, L, H, D], whatever its strides (`kernel_backward.h`, `o_strideM`).
    out, unread = out.transpose(1, 2).contiguous().transpose(1, 2), query.new_empty((), dtype=torch.int64)
    wanted = [True, True, True, False]  # Not the bias.
    gradients = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, query, key, value, bias, out, logsumexp, unread, unread, 0.0, wanted, causal, scale=scale
    )
    grad_query, grad_key, grad_value = (_first(g, width) for g, width in zip(gradients[:3], widths, strict=True))
    return grad_query, _group_sum(grad_key, heads), _group_sum(grad_value, heads)


def _first(x: Tensor, length: int) -> Tensor:
    """The first ``length`` elements of the last dim. (Indexing needs a GPU even on fake tensors.)"""
    return x if x.shape[-1] == length else x.narrow(-1, 0, length)


def _whole_loads(x: Tensor) -> Tensor:
    """``x`` with zeros after the last dim up to a whole number of loads: they change no product."""
    missing = -x.shape[-1] % _WIDTH_MULTIPLE
    return F.pad(x, (0, missing)) if missing else x


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """``mask`` as the memory-efficient kernel takes it: of the query's dtype, [B, H, L, S], rows of whole loads."""
    if mask is None:
        return None
    length = key.shape[-2]
    rows = mask.to(query.dtype).expand(*mask.shape[:-1], length)
    missing = -length % _MASK_MULTIPLE
    padded = F.pad(rows, (0, missing)) if missing else rows
    whole = padded if _is_aligned(padded) else padded.clone(memory_format=torch.contiguous_format)
    return _first(whole, length).expand(*query.shape[:-1], length)


def _is_aligned(x: Tensor) -> bool:
    """Whether each row of ``x`` begins at a whole load."""
    return x.stride(-1) == 1 and all(step % _MASK_MULTIPLE == 0 for step in (*x.stride()[:-1], x.storage_offset()))


def _each_head(x: Tensor, query: Tensor) -> Tensor:
    """Key or value with as many heads as the query: each repeated for its group."""
    groups = query.shape[-3] // x.shape[-3]
    return x if groups == 1 else x.repeat_interleave(groups, -3)


def _group_sum(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of ``x`` with so many heads from that of ``_each_head(x)``."""
    return gradient if gradient.shape[-3] == heads else gradient.unflatten(-3, (heads, -1)).sum(-3)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = _wide(query) @ _wide(key).mT * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Zero in rows where every score is minus infinity, as in torch's kernels."""
    seen = logsumexp > -math.inf
    return (scores - logsumexp.where(seen, 0.0).unsqueeze(-1)).exp()


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, _each_head(key, query), mask, causal, scale)
    logsumexp = scores.logsumexp(-1)
    return (_probabilities(scores, logsumexp) @ _wide(_each_head(value, query))).to(query.dtype), logsumexp


def _written_out_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the scores as in FlashAttention-2 (Dao 2023, section 3.1.2): P * (dP - rowsum(dO * O))."""
    heads = key.shape[-3]
    key, value = _each_head(key, query), _each_head(value, query)
    probabilities = _probabilities(_scores(query, key, mask, causal, scale), logsumexp)
    wide = _wide(grad)
    grad_probabilities = wide @ _wide(value).mT
    grad_scores = probabilities * (grad_probabilities - (wide * _wide(out)).sum(-1, keepdim=True)) * scale
    grad_query, grad_key = grad_scores @ _wide(key), grad_scores.mT @ _wide(query)
    grad_key, grad_value = _group_sum(grad_key, heads), _group_sum(probabilities.mT @ wide, heads)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _shapes(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return output, query.new_empty(query.shape[:-1], dtype=sums)


def _shapes_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


PROCESSOR = Kernel("processor", _processor, _processor_backward)
FLASH = Kernel("flash", _flash, _flash_backward)
EFFICIENT = Kernel("efficient", _efficient, _efficient_backward)
WRITTEN_OUT = Kernel("written_out", _written_out, _written_out_backward)
SHAPES = Kernel("shapes", _shapes, _shapes_backward)
