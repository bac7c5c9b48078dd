"""Small models, on the meta device, whose layouts are priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from autopar.cluster.description import Cluster
from benchmarks.published_models import build
from benchmarks.published_shape import Experts, Shape

A100 = Cluster.get("dgx-a100-80gb")
GPT = Shape(4, 256, 8, 8, 32, 1024, gated=False, vocab=1024, seq=128, flash=True)
LLAMA = replace(GPT, kv_heads=4, gated=True, ffn=512)
SHAPES: Mapping[str, Shape] = {"gpt": GPT, "llama": LLAMA, "mixture": replace(LLAMA, experts=Experts(4, 2, 256))}
BATCH = 16


@cache
def model(name: str = "gpt", dtype: torch.dtype = torch.float32) -> nn.Module:
    return build(SHAPES[name], dtype)


@cache
def batch(size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.empty(size, GPT.seq, dtype=torch.long, device="meta")
    return ids, ids


def summed(output: torch.Tensor) -> torch.Tensor:
    """A loss of whatever a model returns."""
    return output.float().sum()
