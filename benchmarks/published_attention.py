"""Attention of the decoders built from published rows: with heads, grouped, latent; one kernel or written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .published_shape import Latent, Shape


class Attention(nn.Module):
    """``window``: how many tokens each attends to; 0: all before it."""

    def __init__(self, shape: Shape, window: int = 0) -> None:
        super().__init__()
        self.shape, self.window = shape, window
        self.scores = None if shape.flash else Scores(shape)
        inner, outer = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias = not shape.gated or shape.attention_bias
        self.query = nn.Linear(shape.hidden, inner, bias=bias)
        self.key = nn.Linear(shape.hidden, outer, bias=bias)
        self.value = nn.Linear(shape.hidden, outer, bias=bias)
        self.output = nn.Linear(inner, shape.hidden, bias=bias)
        norms = (nn.RMSNorm(shape.head_dim) if shape.normed_heads else nn.Identity() for _ in range(2))
        self.query_norm, self.key_norm = norms
        self.rotary = Rotary() if shape.gated else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape

        def split(y: torch.Tensor, heads: int) -> torch.Tensor:
            return y.view(batch, seq, heads, self.shape.head_dim).transpose(1, 2)

        query = self.rotary(self.query_norm(split(self.query(x), self.shape.heads)))
        key = self.rotary(self.key_norm(split(self.key(x), self.shape.kv_heads)))
        value = split(self.value(x), self.shape.kv_heads)
        if self.window:
            mixed = windowed(query, key, value, self.window)
        else:
            mixed = flash(query, key, value) if self.scores is None else self.scores(query, key, value)
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return result


def dropout(shape: Shape) -> nn.Module:
    return nn.Dropout(0.1) if shape.dropout else nn.Identity()


class Rotary(nn.Module):
    """See :func:`rotary`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rotary(x)


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


class Scores(nn.Module):
    """Scores written out: what libraries without a fused attention kernel do; with ``upcast``, softmax in fp32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.upcast, self.normalised, self.drop = shape.upcast, nn.Softmax(-1), dropout(shape)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (_for_each(x, query.shape[1] // x.shape[1]) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        rows = torch.arange(scores.shape[-1], device=query.device)
        masked = scores.masked_fill(rows > rows[:, None], torch.finfo(scores.dtype).min)
        shares = self.normalised(masked.float() if self.upcast else masked).to(value.dtype)
        mixed: torch.Tensor = self.drop(shares) @ value
        return mixed


def _for_each(x: torch.Tensor, queries: int) -> torch.Tensor:
    """Keys or values [batch, heads, length, width] again for each of the query heads that share one."""
    return x if queries == 1 else x.unsqueeze(2).expand(-1, -1, queries, -1, -1).flatten(1, 2)


def windowed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Each token attends to the last ``window``: blocks of queries to their own block of keys and the one before."""
    batch, heads, seq, width = query.shape
    blocks = seq // window

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, -1, blocks, window, width).transpose(1, 2)

    def both(x: torch.Tensor) -> torch.Tensor:
        before = F.pad(x, (0, 0, window, 0))[:, :, :seq].contiguous()
        return torch.cat((own(before), own(x)), 3).flatten(0, 1)

    place = torch.arange(window, device=query.device)[:, None]
    there = torch.arange(2 * window, device=query.device)
    first = torch.arange(blocks, device=query.device)[:, None, None] == 0
    seen = (there > place) & (there <= place + window) & ~(first & (there < window))
    mask = seen[None, :, None].expand(batch, -1, -1, -1, -1).flatten(0, 1)
    grouped = heads != key.shape[1]
    mixed = F.scaled_dot_product_attention(
        own(query).flatten(0, 1), both(key), both(value), attn_mask=mask, enable_gqa=grouped
    )
    result: torch.Tensor = mixed.unflatten(0, (batch, blocks)).transpose(1, 2).reshape(batch, heads, seq, width)
    return result


class Widened(nn.Module):
    """What latent attention makes of the narrow queries, keys and values: norms, projections, rotary positions. Values
    are padded to the width of the keys, as kernels of one width want them."""

    def __init__(self, shape: Shape, latent: Latent) -> None:
        super().__init__()
        self.heads, self.latent = shape.heads, latent
        self.query_norm, self.norm = nn.RMSNorm(latent.query), nn.RMSNorm(latent.key_value)
        self.query = nn.Linear(latent.query, shape.heads * (latent.head + latent.rotary), bias=False)
        self.key_value = nn.Linear(latent.key_value, shape.heads * (latent.head + latent.value), bias=False)

    def forward(self, query: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[batch, seq, width] each, to queries, keys and values [batch, heads, seq, width of a head]."""
        dims = self.latent

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        query = split(self.query(self.query_norm(query)))
        key_value = split(self.key_value(self.norm(narrow[..., : dims.key_value])))
        turned = rotary(narrow[..., dims.key_value :].unsqueeze(1)).expand(-1, self.heads, -1, -1)
        query = torch.cat((query[..., : dims.head], rotary(query[..., dims.head :])), -1)
        key = torch.cat((key_value[..., : dims.head], turned), -1)
        return query, key, F.pad(key_value[..., dims.head :], (0, dims.head + dims.rotary - dims.value))


class LatentAttention(nn.Module):
    """See :class:`Latent`."""

    def __init__(self, shape: Shape, latent: Latent) -> None:
        super().__init__()
        self.latent, self.up = latent, Widened(shape, latent)
        self.query_down = nn.Linear(shape.hidden, latent.query, bias=False)
        self.down = nn.Linear(shape.hidden, latent.key_value + latent.rotary, bias=False)
        self.output = nn.Linear(shape.heads * latent.value, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        query, key, value = self.up(self.query_down(x), self.down(x))
        mixed = flash(query, key, value)[..., : self.latent.value]
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return result
