"""Scaled dot-product attention as one operation on every device, and causal attention of a part of the queries.

Torch chooses an ATen operation for attention by device, dtype and mask while a model runs, so a graph with one of them
would be a graph for one device. Graphs have ``autopar.attention`` instead; :mod:`.attention_kernels` chooses the kernel
where it runs.

========================================  ====================================================
``autopar.attention``                     output [B, H, L, D] and log-sum-exps [B, H, L]
``autopar.attention_backward``            gradients of query, key and value
``autopar.causal_attention``              output and log-sum-exps of queries from ``start`` on
``autopar.causal_attention_backward``     gradients of these queries; of all keys and values, as a Partial(sum)
========================================  ====================================================

The last two are local operations of a rank: a kernel aligns its causal mask with the first query and the first key it
is given, so a device whose queries begin at position ``start`` of the sequence cannot simply run it. All of its queries
attend to the keys before ``start``; a query attends to keys from ``start`` on up to its own position. The first part is
attention without a mask, the second is causal from its corner, and the two are merged by their log-sum-exps (the online
softmax of Milakov and Gimelshein, 2018, which FlashAttention also uses for its blocks). No mask is materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention_kernels import SHAPES, kernel_for

# The dim of the sequence in torch's attention: [batch, heads, length, width].
_LENGTH = -2

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool is_causal=False, *, float? scale=None)"
    " -> (Tensor output, Tensor logsumexp)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, "
    "Tensor? mask=None, bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``query`` [B, H, L, E], ``key`` [B, H', S, E], ``value`` [B, H', S, D], where H' divides H, and ``mask`` which is
    added to the scores and broadcasts to [B, H, L, S]. Gives the output [B, H, L, D] and the log-sum-exps [B, H, L] of
    the scores, in float32 (float64 for float64). ``scale`` is E ** -0.5 if not given."""
    query, key, value = _rows(query, key, value)
    _check_mask(mask)
    forward = kernel_for(query, key, value, mask, is_causal).forward
    return forward(query, key, value, mask, is_causal, _scale(query, scale))


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``query``, ``key`` and ``value``, given that of the output [B, H, L, D] and what forward gave."""
    grad, query, key, value, output = _rows(grad, query, key, value, output)
    backward = kernel_for(query, key, value, mask, is_causal).backward
    return backward(grad, query, key, value, output, logsumexp, mask, is_causal, _scale(query, scale))


def _check_mask(mask: Tensor | None) -> None:
    if mask is not None and mask.dtype == torch.bool:
        raise TypeError("a mask of truth values; give one to add to the scores: 0 where a key is seen, else -inf")


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return SHAPES.forward(query, key, value, None, False, 1.0)


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return SHAPES.backward(grad, query, key, value, output, logsumexp, None, False, 1.0)


_library.impl("attention", attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::attention", _fake, lib=_library)
torch.library.register_fake("autopar::attention_backward", _fake_backward, lib=_library)


def _rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors with a contiguous last dim, which the kernels assume."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _parts(queries: int, keys: int, start: int) -> list[tuple[int, int, bool]]:
    """``(first key, number of keys, causal)`` of the one or two pieces that queries from ``start`` on attend to."""
    before = min(start, keys)
    corner = min(queries, keys - before)
    pieces = [(0, before, False), (before, corner, True)]
    return [piece for piece in pieces if piece[1]]


def _keys(x: Tensor, first: int, count: int) -> Tensor:
    return x.narrow(_LENGTH, first, count)


def _merge(partials: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint parts of the keys: averages weighted by the sums of exponentials."""
    if len(partials) == 1:
        return partials[0]
    total = torch.logsumexp(torch.stack([sums for _, sums in partials]), 0)
    weighted = [out.to(sums.dtype) * (sums - total).exp().unsqueeze(-1) for out, sums in partials]
    return (weighted[0] + weighted[1]).to(partials[0][0].dtype), total


def causal_attention(
    start: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """What causal :func:`attention` gives for queries [..., l, d] at positions ``start`` and following: the output and
    the log-sum-exps [..., l]."""
    partials = []
    for first, count, causal in _parts(query.shape[_LENGTH], key.shape[_LENGTH], start):
        pieces = _keys(key, first, count), _keys(value, first, count)
        partials.append(attention(query, *pieces, None, causal, scale=scale))
    return _merge(partials)


def causal_attention_backward(
    start: int, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, where ``out`` and ``sums`` (log-sum-exps) are those over all keys.

    Given these, the gradient is a sum over keys, so the parts need no merging: the gradients of the queries add up,
    those of keys and values are disjoint slices, zero for keys that no query here attends to.
    """
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for first, count, causal in _parts(query.shape[_LENGTH], key.shape[_LENGTH], start):
        pieces = _keys(key, first, count), _keys(value, first, count)
        gradients = attention_backward(grad, query, *pieces, out, sums, None, causal, scale=scale)
        grad_query += gradients[0]
        _keys(grad_key, first, count).copy_(gradients[1])
        _keys(grad_value, first, count).copy_(gradients[2])
    return grad_query, grad_key, grad_value


# The first two are in traced graphs, so torch knows them too.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "autopar.attention.default": attention,
    "autopar.attention_backward.default": attention_backward,
    "autopar.causal_attention": causal_attention,
    "autopar.causal_attention_backward": causal_attention_backward,
}
