"""Decoders built from the fields of a published row: GPT, Llama, gated MLP, grouped queries, latent attention, experts.

Plain torch on the meta device. Dims are the row's ``layers``, ``hidden``, ``heads``, ``kv_heads``, ``head_dim``,
``ffn``, ``mlp`` ("gelu" or "swiglu"), ``vocab``, ``seq`` and ``experts``; attention is one kernel ("flash") or written
out ("core").
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from autopar.ops.experts import experts
from autopar.trace.moe_blocks import activation_text

from .published_attention import Attention, LatentAttention, dropout
from .published_shape import Experts, Shape


class Mlp(nn.Module):
    def __init__(self, shape: Shape, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, ffn, bias=False) if shape.gated else None
        self.up = nn.Linear(shape.hidden, ffn, bias=not shape.gated)
        self.down = nn.Linear(ffn, shape.hidden, bias=not shape.gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        active = F.gelu(y, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * y
        result: torch.Tensor = self.down(active)
        return result


def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@cache
def _activation(gated: bool, width: int) -> str:
    with torch.device("cpu"):
        text = activation_text(_gated if gated else _gelu, width, torch.bfloat16)
    assert text is not None
    return text


class Slots(nn.Module):
    """What it takes to bring tokens to the slots of their experts and back by products with masks (GShard, arXiv
    2006.16668, algorithm 2). A group's slots are those of its chosen experts; what the masks hold makes no difference
    to the price, so a token's place among those of its expert is no running count here."""

    def __init__(self, said: Experts) -> None:
        super().__init__()
        self.each, self.wide = -(-said.chosen * said.group // said.number), said.wide_masks

    def forward(self, x: torch.Tensor, gates: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
        """``x`` [batch, seq, hidden]; ``gates`` and ``ids`` of the chosen experts [batch, seq, chosen], to [batch, seq,
        hidden]."""
        made_in = torch.float32 if self.wide else x.dtype
        combine = sum(
            (gate.unsqueeze(-1) * _one_hot(at, experts, made_in)).unsqueeze(-1)
            * _one_hot(at % self.each, self.each, made_in).unsqueeze(-2)
            for gate, at in zip(gates.to(made_in).unbind(-1), ids.unbind(-1), strict=True)
        )
        assert isinstance(combine, torch.Tensor)
        dispatch = (combine != 0).to(x.dtype).flatten(2)
        filled = dispatch.transpose(-1, -2) @ x
        return combine.to(x.dtype).flatten(2) @ filled


def _one_hot(ids: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (ids.unsqueeze(-1) == torch.arange(count, device=ids.device)).to(dtype)


class ExpertMlp(nn.Module):
    """A router, the experts in two tensors, and what is shared by all tokens."""

    def __init__(self, shape: Shape, said: Experts) -> None:
        super().__init__()
        self.said = said
        width = said.ffn * (2 if shape.gated else 1)
        self.activation = _activation(shape.gated, width)
        self.router = nn.Linear(shape.hidden, said.number, bias=False)
        self.up = nn.Parameter(torch.empty(said.number, width, shape.hidden))
        self.down = nn.Parameter(torch.empty(said.number, shape.hidden, said.ffn))
        self.shared = Mlp(shape, said.shared * said.ffn) if said.shared else None
        self.slots = Slots(said) if said.group else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        routed = self.router(tokens)
        gates = torch.softmax(routed.float(), -1)
        weights, ids = torch.topk(gates, self.said.chosen)
        kind, count = self.activation, self.said.number
        # In the dtype of products, as blocks of transformers are traced: under autocast that is not the parameters'.
        each, up, down = (value.to(routed.dtype) for value in (tokens, self.up, self.down))
        chosen = experts(each, ids, weights.to(routed.dtype), up, down, None, None, kind, count, 0)
        result: torch.Tensor = chosen.view_as(x)
        if self.slots is not None:
            chosen_by = (one.view(*x.shape[:2], -1) for one in (weights, ids))
            result = result + self.slots(x, *chosen_by, count)
        return result if self.shared is None else result + self.shared(x)


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
    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(shape), _attention(shape, number)
        self.norm2, self.mlp = Norm(shape), _mlp(shape, number)
        self.drop = dropout(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        result: torch.Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return result


def _attention(shape: Shape, number: int) -> nn.Module:
    if shape.latent is not None:
        return LatentAttention(shape, shape.latent)
    return Attention(shape, shape.window if shape.window and number % shape.window_every == 0 else 0)


def _mlp(shape: Shape, number: int) -> nn.Module:
    if shape.experts is not None and shape.experts.in_layer(number):
        return ExpertMlp(shape, shape.experts)
    return Mlp(shape, shape.ffn)


class Loss(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Beyond(nn.Module):
    """Predicts a token further (DeepSeek-V3, arXiv 2412.19437, section 2.2): what the layers made, and the embedding of
    the token between, go through a projection and a layer more."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList((Norm(shape), Norm(shape)))
        self.projection = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layer, self.norm = Layer(shape, shape.layers), Norm(shape)

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next one starts from, and what goes to the head."""
        made = self.layer(self.projection(torch.cat((self.norms[0](x), self.norms[1](embedded)), -1)))
        return made, self.norm(made)


class OneHot(nn.Module):
    """A table whose rows are chosen by a product with one-hot rows: a system that divides products, but no lookups, can
    divide it (Alpa's ``embed_call_one_hot``)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _one_hot(ids, self.weight.shape[0], self.weight.dtype) @ self.weight


class Decoder(nn.Module):
    """Token ids and labels [batch, seq] to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        table = OneHot if shape.one_hot else nn.Embedding
        self.embedding = table(shape.vocab, shape.hidden)
        self.positions = None if shape.gated else table(shape.seq, shape.hidden)
        self.drop = dropout(shape)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = Norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.loss = Loss()
        self.beyond = nn.ModuleList(Beyond(shape) for _ in range(shape.beyond))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            places = torch.arange(ids.shape[1], device=ids.device)
            # Systems that look up by products make one for the places of each sequence.
            x = x + self.positions(places.expand_as(ids) if isinstance(self.positions, OneHot) else places)
        x = embedded = self.drop(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.loss(self.head(self.norm(x)), labels)
        for further in self.beyond:
            x, normed = further(x, embedded)
            result = result + self.loss(self.head(normed), labels)
        return result


def build(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """The decoder on the meta device."""
    with torch.device("meta"):
        return Decoder(shape).to(dtype)
