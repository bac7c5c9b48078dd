"""Real calls of scaled dot-product attention."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats, masks

_ATTENTION = "autopar.attention"
_MATH = "aten._scaled_dot_product_attention_math.default"


def _attention(
    batch: int,
    heads: int,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    kv_heads: int | None = None,
    lengths: tuple[int, int] | None = None,
) -> list[Sample]:
    """Queries [batch, heads, 5, 8], keys of length 5 (7 unless causal), or of the ``lengths`` given."""
    queries, keys = lengths or (5, 5 if causal else 7)
    q, grad = floats(batch, heads, queries, 8), floats(batch, heads, queries, 8)
    k, v = (floats(batch, kv_heads or heads, keys, 8) for _ in range(2))
    out, logsumexp = torch.ops.autopar.attention.default(q, k, v, mask, causal)
    return [
        Sample(f"{_ATTENTION}.default", (q, k, v, mask, causal)),
        Sample(f"{_ATTENTION}_backward.default", (grad, q, k, v, out, logsumexp, mask, causal), {"scale": None}),
    ]


def _math(batch: int, heads: int, kv_heads: int, mask: torch.Tensor | None, causal: bool = False) -> list[Sample]:
    q, k, v = floats(batch, heads, 5, 8), floats(batch, kv_heads, 5, 8), floats(batch, kv_heads, 5, 6)
    return [Sample(_MATH, (q, k, v, mask, 0.0, causal), {"enable_gqa": kv_heads != heads})]


SAMPLES = [
    *_attention(12, 4),
    *_attention(5, 7, causal=True),
    *_attention(4, 6, mask=floats(5, 7)),
    *_attention(4, 12, mask=floats(4, 1, 5, 7)),
    *_attention(5, 6, mask=floats(1, 6, 5, 7)),
    *_attention(5, 7, mask=floats(5, 7, 5, 7)),
    *_attention(1, 3, causal=True, lengths=(17, 17)),
    *_attention(2, 1, causal=True, lengths=(12, 12)),
    *_attention(1, 1, causal=True, lengths=(12, 7)),
    *_attention(1, 1, causal=True, lengths=(7, 12)),
    *_attention(1, 3, mask=floats(17, 9), lengths=(17, 9)),
    *_attention(2, 1, mask=floats(2, 1, 1, 9), lengths=(12, 9)),
    *_math(4, 7, 7, None, causal=True),
    *_math(5, 12, 4, None),
    *_math(4, 6, 3, floats(4, 1, 5, 5)),
    *_math(3, 4, 4, masks(6, 1, 1, 5)[:3] | torch.eye(5, dtype=torch.bool)),
    Sample(_MATH, (floats(7, 5, 8), floats(7, 5, 8), floats(7, 5, 8))),
]
