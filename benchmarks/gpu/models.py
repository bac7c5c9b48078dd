"""The models that the kit trains: of 25 (ResNet-50) to 400 million parameters, from transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .setting import Setting

# Language models, whose rows are tokens; of others they are images.
LANGUAGE = ("llama", "gpt2", "bert", "mixtral", "qwen3_moe")
TRAINED = (*LANGUAGE, "vit", "resnet50")
# Sequences of a device, by the least GiB of its memory. Chosen: logits and activations of 350 million parameters under
# bf16 take about 3 GiB for each sequence, and weights, gradients and the state of AdamW 6 GiB.
_SEQUENCES = ((70, 8), (36, 4), (20, 2), (0, 1))
# Images, or sequences of half the length, of a device for each of those. Chosen: of a ViT-L they take about as much.
_IMAGES, _HALVES = 8, 2
_CLASSES = 1000


@dataclass(frozen=True)
class Size:
    """Sizes that models share; ``inner``: the width inside a block, of the Llama; ``image``: pixels along a side."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    length: int
    image: int = 224


LARGE = Size(vocabulary=32000, width=1024, inner=2816, layers=24, heads=16, length=1024)
TINY = Size(vocabulary=128, width=32, inner=64, layers=2, heads=2, length=16, image=32)


def size_of(setting: Setting) -> Size:
    return TINY if setting.tiny else LARGE


def make_model(name: str, setting: Setting) -> nn.Module:
    """The model in float32, made on the device, with the same weights every time, and without dropout."""
    torch.manual_seed(0)
    with setting.device:
        return _MODELS[name](size_of(setting))


def _llama(size: Size) -> nn.Module:
    return _of(transformers.LlamaForCausalLM, transformers.LlamaConfig, size, num_hidden_layers=size.layers)


def _mixtral(size: Size) -> nn.Module:
    """Few large experts: 8, of which a token takes 2."""
    layers = max(2, size.layers // 3)
    return _of(
        transformers.MixtralForCausalLM, transformers.MixtralConfig, size, num_hidden_layers=layers, num_local_experts=8
    )


def _qwen3_moe(size: Size) -> nn.Module:
    """Many small experts: 64, of which a token takes 8."""
    return _of(
        transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, size, num_hidden_layers=max(2, size.layers // 3),
        num_experts=64, num_experts_per_tok=8, moe_intermediate_size=size.width // 4, head_dim=size.width // size.heads,
    )  # fmt: skip


def _of(kind: Any, config: Any, size: Size, **more: Any) -> nn.Module:
    """A model of the family of Llama's."""
    made = config(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.inner,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, max_position_embeddings=size.length,
        use_cache=False, **more,
    )  # fmt: skip
    model: nn.Module = kind(made)
    return model


def _gpt2(size: Size) -> nn.Module:
    """GPT-2 medium."""
    config = transformers.GPT2Config(
        vocab_size=50257 if size is LARGE else size.vocabulary, n_positions=size.length, n_embd=size.width,
        n_layer=size.layers, n_head=size.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _bert(size: Size) -> nn.Module:
    """BERT large."""
    config = transformers.BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=4 * size.width, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=size.length,
    )  # fmt: skip
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _vit(size: Size) -> nn.Module:
    """ViT-L/16."""
    config = transformers.ViTConfig(
        hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        intermediate_size=4 * size.width, image_size=size.image, num_labels=_CLASSES,
    )  # fmt: skip
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def _resnet50(size: Size) -> nn.Module:
    sizes = {} if size is LARGE else {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    model: nn.Module = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(num_labels=_CLASSES, **sizes)
    )
    return model


_MODELS: Mapping[str, Callable[[Size], nn.Module]] = {
    "llama": _llama, "gpt2": _gpt2, "bert": _bert, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "vit": _vit,
    "resnet50": _resnet50,
}  # fmt: skip


def make_batch(name: str, setting: Setting) -> dict[str, Tensor]:
    """The global batch on this process's device, the same on every process: tokens [sequences, length], or images
    [images, 3, side, side]; and labels."""
    size, count = size_of(setting), sequences(setting) * setting.world
    generator = torch.Generator().manual_seed(1)
    if name not in LANGUAGE:
        images = torch.randn(_IMAGES * count, 3, size.image, size.image, generator=generator)
        labels = torch.randint(0, _CLASSES, (_IMAGES * count,), generator=generator)
        return {"pixel_values": images.to(setting.device), "labels": labels.to(setting.device)}
    vocabulary = 50257 if name == "gpt2" and size is LARGE else size.vocabulary
    shape = (_HALVES * count, size.length // _HALVES) if name == "bert" else (count, size.length)
    ids = torch.randint(0, vocabulary, shape, generator=generator).to(setting.device)
    return {"input_ids": ids, "labels": ids}


def sequences(setting: Setting) -> int:
    """Sequences of a device."""
    if setting.kind != "cuda":
        return 2
    memory = torch.cuda.get_device_properties(setting.device).total_memory / 2**30
    return next(count for least, count in _SEQUENCES if memory >= least)


def model_flops(name: str, model: Any, batch: Mapping[str, Tensor]) -> float | None:
    """Floating-point operations of forward and backward of the global ``batch`` of a language model: six for each token
    and element of a matrix that multiplies it (embeddings look up; a tied head multiplies; of experts those that it
    takes), and attention, causal but in BERT. None of others."""
    if name not in LANGUAGE:
        return None
    config = model.config
    tokens, length = batch["input_ids"].numel(), batch["input_ids"].shape[1]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings)
    experts = sum(p.numel() / p.shape[0] for p in model.parameters() if p.dim() == 3)
    head = config.vocab_size * config.hidden_size if id(model.get_output_embeddings().weight) in embeddings else 0
    attention = (12 if name == "bert" else 6) * config.num_hidden_layers * config.hidden_size * length
    taken = experts * getattr(config, "num_experts_per_tok", 0)
    return float(tokens * (6 * (weights + taken + head) + attention))
