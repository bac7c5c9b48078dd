"""Small models, with a batch each, that tests share: every family whose plans must be right, at sizes that run in a
moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 257
Batch = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]
Case = tuple[nn.Module, Batch]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(batch: int = 8, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids, and labels of which about a third are ignored, unequally many per row."""
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator(seed))
    ignored = torch.rand(batch, length, generator=generator(seed + 1)) < 0.3
    return {"input_ids": ids, "labels": torch.where(ignored, -100, ids)}


def pictures(batch: int = 8) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator()), "labels": torch.arange(batch) % 10}


def gpt2(layers: int = 2) -> Case:
    """Tied weights, Conv1D, and a vocabulary that divides nothing."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=48, n_head=4, vocab_size=VOCABULARY,
        n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), text()


def llama(layers: int = 2) -> Case:
    """Grouped-query attention, 6 heads: not divisible by 4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config), text()


def bert(layers: int = 2) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=48, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=96, vocab_size=VOCABULARY,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    batch = text()
    return BertForMaskedLM(config), {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def vit(layers: int = 2) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=48, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=96,
        image_size=32, patch_size=8,
        num_labels=10, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return ViTForImageClassification(config), pictures()


def resnet() -> Case:
    """Batch norm in training mode: statistics of the global batch."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config), pictures()


class Plain(nn.Module):
    """One tensor twice in one operation, one weight in two places, a weight without gradient."""

    def __init__(self, width: int = 12, hidden: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        mixed = self.up.weight @ self.down.weight @ self.up.weight @ self.up.weight.T
        hidden = torch.tanh(hidden * hidden) + hidden @ mixed
        return (((self.down(hidden) * self.scale) - y) ** 2).mean()


class Stack(nn.Module):
    """Equal layers under a tied head, returning loss and scores by name; ``unequal`` makes the first layer wider."""

    def __init__(self, layers: int = 4, width: int = 16, hidden: int = 32, unequal: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, size), nn.GELU(), nn.Linear(size, width))
            for size in (hidden * (3 if unequal and layer == 0 else 1) for layer in range(layers))
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x)
        if labels is None:
            return {"scores": scores}
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "scores": scores}


def plain() -> Case:
    return Plain(), (torch.randn(8, 12, generator=generator()), torch.randn(8, 12, generator=generator(1)))


def stack() -> Case:
    return Stack(), text(8, 8)


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "resnet": resnet, "plain": plain,
}  # fmt: skip


def make(name: str, **changes: Any) -> Case:
    """The model called ``name`` with the same weights every time."""
    torch.manual_seed(0)
    return {**MODELS, "stack": stack}[name](**changes)
