"""Real calls of scaled dot-product attention on CPU; the forms that only run elsewhere are listed with the
reason."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats, masks

aten = torch.ops.aten
_CPU = "aten._scaled_dot_product_flash_attention_for_cpu"
_MATH = "aten._scaled_dot_product_attention_math.default"


def _flash(
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
    kwargs = {} if mask is None else {"attn_mask": mask}
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, **kwargs)
    samples = [
        Sample(f"{_CPU}.default", (q, k, v, 0.0, causal), kwargs),
        Sample(
            f"{_CPU}_backward.default",
            (grad, q, k, v, out, logsumexp, 0.0, causal),
            {**kwargs, "scale": None},
        ),
    ]
    return samples


def _math(batch: int, heads: int, kv_heads: int, mask: torch.Tensor | None, causal: bool = False) -> list[Sample]:
    q, k, v = floats(batch, heads, 5, 8), floats(batch, kv_heads, 5, 8), floats(batch, kv_heads, 5, 6)
    return [Sample(_MATH, (q, k, v, mask, 0.0, causal), {"enable_gqa": kv_heads != heads})]


SAMPLES = [
    *_flash(12, 4),
    *_flash(5, 7, causal=True),
    *_flash(4, 6, mask=floats(5, 7)),
    *_flash(4, 12, mask=floats(4, 1, 5, 7)),
    *_flash(5, 6, mask=floats(1, 6, 5, 7)),
    *_flash(5, 7, mask=floats(5, 7, 5, 7)),
    *_flash(1, 3, causal=True, lengths=(17, 17)),
    *_flash(2, 1, causal=True, lengths=(12, 12)),
    *_flash(1, 1, causal=True, lengths=(12, 7)),
    *_flash(1, 1, causal=True, lengths=(7, 12)),
    *_flash(1, 3, mask=floats(17, 9), lengths=(17, 9)),
    *_flash(2, 1, mask=floats(2, 1, 1, 9), lengths=(12, 9)),
    *_math(4, 7, 7, None, causal=True),
    *_math(5, 12, 4, None),
    *_math(4, 6, 3, floats(4, 1, 5, 5)),
    *_math(3, 4, 4, masks(6, 1, 1, 5)[:3] | torch.eye(5, dtype=torch.bool)),
    Sample(_MATH, (floats(7, 5, 8), floats(7, 5, 8), floats(7, 5, 8))),
]

_NO_CPU = "has no CPU kernel"
NEEDS_CUDA = {
    f"aten._scaled_dot_product_{form}.default": _NO_CPU
    for form in (
        "flash_attention",
        "flash_attention_backward",
        "efficient_attention",
        "efficient_attention_backward",
        "cudnn_attention",
        "cudnn_attention_backward",
        "fused_attention_overrideable",
        "fused_attention_overrideable_backward",
    )
}
