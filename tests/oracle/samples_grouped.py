"""Grouped products with groups of unequal length, empty ones among them."""

from __future__ import annotations

import torch
import transformers.integrations.moe  # registers its operation

from .harness import Sample
from .random_tensors import floats

assert transformers.integrations.moe

_NAME = "transformers.grouped_mm_fallback"


def _ends(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def _samples(ends: torch.Tensor, inner: int, outer: int) -> list[Sample]:
    rows, groups = int(ends[-1]), len(ends)
    x, matrices, grad = floats(rows, inner), floats(groups, inner, outer), floats(rows, outer)
    torchs = [
        Sample("aten._grouped_mm.default", (x, matrices, ends)),
        Sample("aten._grouped_mm.default", (x.t().contiguous(), grad, ends)),
    ]
    # Torch's operation wants rows of whole 16 bytes, shards included.
    return [
        *(torchs if inner % 16 == 0 and outer % 16 == 0 else ()),
        Sample(f"{_NAME}.default", (x, matrices, ends)),
        Sample(f"{_NAME}_backward.default", (x, matrices, ends, grad)),
    ]


SAMPLES = [
    *_samples(_ends(4, 4, 9, 16), 16, 32),
    *_samples(_ends(3, 8, 8, 9, 20, 24), 48, 16),
    *_samples(_ends(0, 2, 11), 5, 7),
    *_samples(_ends(9, 9, 10, 12, 13, 13, 17), 6, 4),
]
