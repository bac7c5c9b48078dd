"""Decoders built from the fields of a published row: GPT, Llama, gated MLP, grouped queries, experts.

Plain torch on the meta device. Dims are the row's ``layers``, ``hidden``, ``heads``, ``kv_heads``, ``head_dim``,
``ffn``, ``mlp`` ("gelu" or "swiglu"), ``vocab`` and ``seq``; attention is one kernel ("flash") or written out ("core").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Vocabularies are padded to a multiple of this, as training libraries do so that it divides among devices.
PADDED = 128


class NotExpressible(Exception):
    """Why a row is skipped."""


@dataclass(frozen=True)
class Shape:
    """The dims of a decoder; ``flash``: attention is one kernel, and what is recomputed of it is not its scores."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    seq: int
    flash: bool

    @staticmethod
    def of(model: Mapping[str, Any], *, flash: bool) -> Shape:
        """Raises :class:`NotExpressible` for what is no dense decoder, or lacks a dim."""
        missing = [name for name in ("layers", "hidden", "heads", "seq", "vocab") if not model.get(name)]
        if missing:
            raise NotExpressible(f"the model's {', '.join(missing)} are not given")
        odd = [name for name in ("experts", "experts_every_other_layer", "image") if model.get(name)]
        odd += [f"{model['attention']} attention"] if model.get("attention") else []
        if odd:
            raise NotExpressible(f"{', '.join(odd)}: no plain decoder")
        hidden, heads = int(model["hidden"]), int(model["heads"])
        gated = model.get("mlp", "gelu") == "swiglu"
        return Shape(
            int(model["layers"]),
            hidden,
            heads,
            int(model.get("kv_heads") or heads),
            int(model.get("head_dim") or hidden // heads),
            int(model.get("ffn") or 4 * hidden),
            gated,
            -(-int(model["vocab"]) // PADDED) * PADDED,
            int(model["seq"]),
            flash,
        )


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, outer = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias = not shape.gated
        self.query = nn.Linear(shape.hidden, inner, bias=bias)
        self.key = nn.Linear(shape.hidden, outer, bias=bias)
        self.value = nn.Linear(shape.hidden, outer, bias=bias)
        self.output = nn.Linear(inner, shape.hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape

        def split(y: torch.Tensor, heads: int) -> torch.Tensor:
            return y.view(batch, seq, heads, self.shape.head_dim).transpose(1, 2)

        query = split(self.query(x), self.shape.heads)
        key, value = (split(f(x), self.shape.kv_heads) for f in (self.key, self.value))
        if self.shape.gated:
            query, key = rotary(query), rotary(key)
        mixed = (flash if self.shape.flash else core)(query, key, value)
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return result


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of the two halves of a head turned by angles that grow with the place."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * torch.cat((rates, rates))
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Scores written out: what libraries without a fused attention kernel do."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    rows = torch.arange(scores.shape[-1], device=query.device)
    masked = scores.masked_fill(rows > rows[:, None], torch.finfo(scores.dtype).min)
    return torch.softmax(masked, -1) @ value


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False) if shape.gated else None
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=not shape.gated)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=not shape.gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        active = F.gelu(y, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * y
        result: torch.Tensor = self.down(active)
        return result


class Norm(nn.Module):
    """Layer norm with GELU, RMS norm in gated models."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.hidden))
        self.bias = None if shape.gated else nn.Parameter(torch.empty(shape.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = (x.shape[-1],)
        return F.rms_norm(x, dims, self.weight) if self.bias is None else F.layer_norm(x, dims, self.weight, self.bias)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(shape), Attention(shape)
        self.norm2, self.mlp = Norm(shape), Mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Loss(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Decoder(nn.Module):
    """Token ids and labels [batch, seq] to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.gated else nn.Embedding(shape.seq, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.loss = Loss()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.loss(self.head(self.norm(x)), labels)
        return result


def build(shape: Shape) -> Decoder:
    """The decoder on the meta device, in bf16."""
    with torch.device("meta"):
        return Decoder(shape).bfloat16()
