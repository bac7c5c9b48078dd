"""Causal attention of one device's part of the queries.

A kernel aligns its causal mask with the first query and the first key it is given, so a device whose queries begin at
position ``start`` of the sequence cannot simply run it. All of its queries attend to the keys before ``start``; a query
attends to keys from ``start`` on up to its own position. The first part is attention without a mask, the second is
causal from its corner, and the two are merged by their log-sum-exps (the online softmax of Milakov and Gimelshein,
2018, which FlashAttention also uses for its blocks). No mask is materialised, so this serves every kernel that returns
log-sum-exps.

======================================  ====================================================
``autopar.causal_attention``            output and log-sum-exps of queries from ``start`` on
``autopar.causal_attention_backward``   gradients of these queries; of all keys and values, as a Partial(sum)
======================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The dim of the sequence in torch's attention: [batch, heads, length, width].
_LENGTH = -2


def _kernel(op: str) -> Any:
    _, name, overload = op.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


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


def _set(options: Sequence[Any], position: int, causal: bool) -> list[Any]:
    return [*options[:position], causal, *options[position + 1 :]]


def _merge(partials: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint parts of the keys: averages weighted by the sums of exponentials."""
    if len(partials) == 1:
        return partials[0]
    total = torch.logsumexp(torch.stack([sums for _, sums in partials]), 0)
    weighted = [out.to(sums.dtype) * (sums - total).exp().unsqueeze(-1) for out, sums in partials]
    return (weighted[0] + weighted[1]).to(partials[0][0].dtype), total


def causal_attention(
    op: str, start: int, causal_at: int, query: Tensor, key: Tensor, value: Tensor, *options: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Computes ``op(query, key, value, *options)`` for queries [..., l, d] at positions from ``start`` on.

    ``options[causal_at]`` is the kernel's ``is_causal``. The results are those of ``op``: first the output, then the
    log-sum-exps [..., l].
    """
    query, key, value = _rows(query, key, value)
    kernel, partials, extras = _kernel(op), [], ()
    for first, count, causal in _parts(query.shape[_LENGTH], key.shape[_LENGTH], start):
        arguments = _set(options, causal_at, causal)
        results = kernel(query, _keys(key, first, count), _keys(value, first, count), *arguments, **kwargs)
        partials.append((results[0], results[1]))
        extras = tuple(results[2:])
    return (*_merge(partials), *extras)


def causal_attention_backward(
    op: str, start: int, causal_at: int, grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    out: Tensor, sums: Tensor, *options: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; ``out`` and ``sums`` (log-sum-exps) are those over all keys.

    Given these, the gradient is a sum over keys, so the parts need no merging: the gradients of the queries add up,
    those of keys and values are disjoint slices, zero for keys that no query here attends to.
    """
    grad, query, key, value, out = _rows(grad, query, key, value, out)
    kernel = _kernel(op)
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for first, count, causal in _parts(query.shape[_LENGTH], key.shape[_LENGTH], start):
        arguments = _set(options, causal_at, causal)
        pieces = _keys(key, first, count), _keys(value, first, count)
        results = kernel(grad, query, *pieces, out, sums, *arguments, **kwargs)
        grad_query += results[0]
        _keys(grad_key, first, count).copy_(results[1])
        _keys(grad_value, first, count).copy_(results[2])
    return grad_query, grad_key, grad_value
