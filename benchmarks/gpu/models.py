"""The models that the kit trains: a Llama and a GPT-2 of about 350 million parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .setting import Setting

TRAINED = ("llama", "gpt2")
# Sequences of a device, by the least GiB of its memory. Chosen: logits and activations of 350 million parameters under
# bf16 take about 3 GiB for each sequence, and weights, gradients and the state of AdamW 6 GiB.
_SEQUENCES = ((70, 8), (36, 4), (20, 2), (0, 1))


@dataclass(frozen=True)
class Size:
    """Sizes that models share; ``inner``: the width inside a block, of the Llama."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    length: int


LARGE = Size(vocabulary=32000, width=1024, inner=2816, layers=24, heads=16, length=1024)
TINY = Size(vocabulary=128, width=32, inner=64, layers=2, heads=2, length=16)


def size_of(setting: Setting) -> Size:
    return TINY if setting.tiny else LARGE


def make_model(name: str, setting: Setting) -> nn.Module:
    """The model in float32, made on the device, with the same weights every time, and without dropout."""
    torch.manual_seed(0)
    size = size_of(setting)
    with setting.device:
        return _llama(size) if name == "llama" else _gpt2(size, setting.tiny)


def _llama(size: Size) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, max_position_embeddings=size.length,
        use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _gpt2(size: Size, tiny: bool) -> nn.Module:
    """GPT-2 medium."""
    config = transformers.GPT2Config(
        vocab_size=size.vocabulary if tiny else 50257, n_positions=size.length, n_embd=size.width, n_layer=size.layers,
        n_head=size.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def make_batch(setting: Setting, vocabulary: int) -> dict[str, Tensor]:
    """The global batch [sequences, length] on this process's device, the same on every process."""
    size = size_of(setting)
    ids = torch.randint(0, vocabulary, (sequences(setting) * setting.world, size.length), generator=_generator())
    ids = ids.to(setting.device)
    return {"input_ids": ids, "labels": ids}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def sequences(setting: Setting) -> int:
    """Sequences of a device."""
    if setting.kind != "cuda":
        return 2
    memory = torch.cuda.get_device_properties(setting.device).total_memory / 2**30
    return next(count for least, count in _SEQUENCES if memory >= least)


def flops(model: Any, batch: Mapping[str, Tensor]) -> float:
    """Floating-point operations of forward and backward of the global ``batch``: six for each token and element of a
    matrix that multiplies it (embeddings look up; a tied head multiplies), and causal attention."""
    tokens, length = batch["input_ids"].numel(), batch["input_ids"].shape[1]
    config = model.config
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings)
    head = config.vocab_size * config.hidden_size if id(model.get_output_embeddings().weight) in embeddings else 0
    attention = 6 * config.num_hidden_layers * config.hidden_size * length  # Twelve, and half of the scores.
    return float(tokens * (6 * (weights + head) + attention))
