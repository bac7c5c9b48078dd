"""Causal attention of one device's part of the queries.

A kernel aligns its causal mask with the first query and the first key it is given, so a device whose queries begin at
position ``start`` of the sequence cannot simply run it. Keys before ``start`` are seen by all of its queries, keys from
``start`` on by those not before them: the first part is attention without a mask, the second is causal from its corner,
and the two are put together by their log-sum-exps (the online softmax of Milakov and Gimelshein, 2018, which is also
what FlashAttention does with its blocks). No mask is ever made, so this serves every kernel that returns
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

_LENGTH = -2


def _kernel(op: str) -> Any:
    _, name, overload = op.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def _rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors with a last dim in one piece, which the kernels assume."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _parts(queries: int, keys: int, start: int) -> list[tuple[int, int, bool]]:
    """``(first key, number of keys, causal)`` of the one or two pieces that queries from ``start`` on look at."""
    seen = min(start, keys)
    corner = min(queries, keys - seen)
    pieces = [(0, seen, False), (seen, corner, True)]
    return [piece for piece in pieces if piece[1]]


def _keys(x: Tensor, first: int, count: int) -> Tensor:
    return x.narrow(_LENGTH, first, count)


def _set(options: Sequence[Any], position: int, causal: bool) -> list[Any]:
    return [*options[:position], causal, *options[position + 1 :]]


def _merge(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from that over disjoint parts of them: averages weighted by the sums of exponentials."""
    if len(found) == 1:
        return found[0]
    total = torch.logsumexp(torch.stack([sums for _, sums in found]), 0)
    weighted = [out.to(sums.dtype) * (sums - total).exp().unsqueeze(-1) for out, sums in found]
    return (weighted[0] + weighted[1]).to(found[0][0].dtype), total


def causal_attention(
    op: str, start: int, causal_at: int, query: Tensor, key: Tensor, value: Tensor, *options: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """What ``op(query, key, value, *options)`` gives for queries [..., l, d] at positions ``start`` and following.

    ``options[causal_at]`` is the kernel's ``is_causal``. The results are those of ``op``: first the output, then the
    log-sum-exps [..., l].
    """
    query, key, value = _rows(query, key, value)
    kernel, found, rest = _kernel(op), [], ()
    for first, count, causal in _parts(query.shape[_LENGTH], key.shape[_LENGTH], start):
        chosen = _set(options, causal_at, causal)
        results = kernel(query, _keys(key, first, count), _keys(value, first, count), *chosen, **kwargs)
        found.append((results[0], results[1]))
        rest = tuple(results[2:])
    return (*_merge(found), *rest)


def causal_attention_backward(
    op: str, start: int, causal_at: int, grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    out: Tensor, sums: Tensor, *options: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, where ``out`` and ``sums`` (log-sum-exps) are those over all keys.

    Given these, the gradient is a sum over keys, so the parts need no merging: that of the queries adds up, those of
    keys and values lie beside each other, zero for keys that no query here sees.
    """
    grad, query, key, value, out = _rows(grad, query, key, value, out)
    kernel = _kernel(op)
    of_query, of_key, of_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for first, count, causal in _parts(query.shape[_LENGTH], key.shape[_LENGTH], start):
        chosen = _set(options, causal_at, causal)
        pieces = _keys(key, first, count), _keys(value, first, count)
        results = kernel(grad, query, *pieces, out, sums, *chosen, **kwargs)
        of_query += results[0]
        _keys(of_key, first, count).copy_(results[1])
        _keys(of_value, first, count).copy_(results[2])
    return of_query, of_key, of_value
