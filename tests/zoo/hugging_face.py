"""Small Hugging Face models of many families; sizes divide nothing: vocabulary 257, 3 heads, 17 tokens, batch 6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Batch = tuple[Any, ...] | dict[str, Any]
Maker = Callable[[], tuple[nn.Module, Batch]]

BATCH, TOKENS, VOCABULARY, WIDTH, HEADS, HIDDEN = 6, 17, 257, 48, 3, 80
FAMILIES: dict[str, Maker] = {}


def family(maker: Maker) -> Maker:
    """Registers a maker under its name."""
    FAMILIES[maker.__name__] = maker
    return maker


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(batch: int = BATCH, length: int = TOKENS, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids, none of them among the special ones."""
    return torch.randint(3, vocabulary, (batch, length), generator=_random(0))


def labels() -> torch.Tensor:
    """Labels, a third of them to be ignored."""
    return torch.where(torch.rand(BATCH, TOKENS, generator=_random(1)) < 0.3, -100, tokens())


def mask() -> torch.Tensor:
    """An attention mask with rows of different lengths."""
    lengths = torch.tensor([17, 17, 12, 9, 17, 5])[:, None]
    return (torch.arange(TOKENS)[None] < lengths).long()


def floats(*shape: int) -> torch.Tensor:
    """Normal numbers, the same every time."""
    return torch.randn(shape, generator=_random(2))


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size, generator=_random(2))


def _text(model: nn.Module, *, masked: bool = False) -> tuple[nn.Module, Batch]:
    batch = {"input_ids": tokens(), "labels": labels()}
    return model, batch | ({"attention_mask": mask()} if masked else {})


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
}  # fmt: skip
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_DECODER: dict[str, Any] = {**_SIZES, **SPECIAL, "intermediate_size": HIDDEN, "use_cache": False}


@family
def opt() -> tuple[nn.Module, Batch]:
    config = hf.OPTConfig(
        **_SIZES, **SPECIAL, ffn_dim=HIDDEN, dropout=0.0, word_embed_proj_dim=WIDTH, max_position_embeddings=40
    )
    return _text(hf.OPTForCausalLM(config), masked=True)


@family
def gpt_neox() -> tuple[nn.Module, Batch]:
    return _text(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_DECODER, hidden_dropout=0.0, attention_dropout=0.0)))


@family
def mistral() -> tuple[nn.Module, Batch]:
    return _text(hf.MistralForCausalLM(hf.MistralConfig(**_DECODER, num_key_value_heads=1, sliding_window=8)))


@family
def qwen2() -> tuple[nn.Module, Batch]:
    return _text(hf.Qwen2ForCausalLM(hf.Qwen2Config(**_DECODER, num_key_value_heads=1)), masked=True)


@family
def gemma2() -> tuple[nn.Module, Batch]:
    return _text(
        hf.Gemma2ForCausalLM(hf.Gemma2Config(**_DECODER, num_key_value_heads=1, head_dim=12, sliding_window=8))
    )


@family
def phi3() -> tuple[nn.Module, Batch]:
    return _text(hf.Phi3ForCausalLM(hf.Phi3Config(**_DECODER, num_key_value_heads=3)))


@family
def falcon() -> tuple[nn.Module, Batch]:
    config = hf.FalconConfig(**_SIZES, **SPECIAL, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False)
    return _text(hf.FalconForCausalLM(config))


@family
def bloom() -> tuple[nn.Module, Batch]:
    config = hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
        use_cache=False, **SPECIAL,
    )  # fmt: skip
    return _text(hf.BloomForCausalLM(config), masked=True)


@family
def stablelm() -> tuple[nn.Module, Batch]:
    return _text(hf.StableLmForCausalLM(hf.StableLmConfig(**_DECODER, num_key_value_heads=3)))


@family
def t5() -> tuple[nn.Module, Batch]:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=HIDDEN, num_layers=2, num_heads=HEADS, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=2, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return _text(hf.T5ForConditionalGeneration(config), masked=True)


@family
def bart() -> tuple[nn.Module, Batch]:
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=HIDDEN, decoder_ffn_dim=HIDDEN, dropout=0.0, use_cache=False,
        max_position_embeddings=40, decoder_start_token_id=0, forced_eos_token_id=1, **SPECIAL,
    )  # fmt: skip
    return _text(hf.BartForConditionalGeneration(config), masked=True)


@family
def clip() -> tuple[nn.Module, Batch]:
    text = {**_SIZES, **SPECIAL, "intermediate_size": HIDDEN, "max_position_embeddings": 40}
    vision = {k: v for k, v in text.items() if k in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    vision |= {"intermediate_size": HIDDEN, "image_size": 32, "patch_size": 8}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=20))
    return model, {"input_ids": tokens(), "attention_mask": mask(), "pixel_values": images(), "return_loss": True}


@family
def swin() -> tuple[nn.Module, Batch]:
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=12, depths=[2, 2], num_heads=[3, 3], window_size=4, drop_path_rate=0.0,
        num_labels=10, **NO_DROPOUT,
    )  # fmt: skip
    return hf.SwinForImageClassification(config), {"pixel_values": images(), "labels": torch.arange(BATCH)}


@family
def convnext() -> tuple[nn.Module, Batch]:
    config = hf.ConvNextConfig(hidden_sizes=[12, 24], depths=[1, 2], num_stages=2, num_labels=10)
    return hf.ConvNextForImageClassification(config), {"pixel_values": images(), "labels": torch.arange(BATCH)}


@family
def segformer() -> tuple[nn.Module, Batch]:
    config = hf.SegformerConfig(
        depths=[1, 1, 1, 1], sr_ratios=[4, 2, 1, 1], hidden_sizes=[6, 8, 12, 24], num_attention_heads=[1, 2, 3, 3],
        mlp_ratios=[2, 2, 2, 2], decoder_hidden_size=20, num_labels=5, drop_path_rate=0.0,
        classifier_dropout_prob=0.0, **NO_DROPOUT,
    )  # fmt: skip
    target = torch.randint(0, 5, (BATCH, 32, 32), generator=_random(3))
    return hf.SegformerForSemanticSegmentation(config), {"pixel_values": images(), "labels": target}


@family
def roberta() -> tuple[nn.Module, Batch]:
    config = hf.RobertaConfig(**_SIZES, **SPECIAL, **NO_DROPOUT, intermediate_size=HIDDEN, max_position_embeddings=40)
    return _text(hf.RobertaForMaskedLM(config), masked=True)


@family
def electra() -> tuple[nn.Module, Batch]:
    config = hf.ElectraConfig(**_SIZES, **NO_DROPOUT, embedding_size=20, intermediate_size=HIDDEN, num_labels=3)
    batch = {"input_ids": tokens(), "attention_mask": mask(), "labels": torch.arange(BATCH) % 3}
    return hf.ElectraForSequenceClassification(config), batch


@family
def deberta_v2() -> tuple[nn.Module, Batch]:
    config = hf.DebertaV2Config(
        **_SIZES, **NO_DROPOUT, intermediate_size=HIDDEN, relative_attention=True, position_buckets=8,
        norm_rel_ebd="layer_norm",
        pos_att_type=["p2c", "c2p"], share_att_key=True, max_position_embeddings=40, pad_token_id=2,
    )  # fmt: skip
    return _text(hf.DebertaV2ForMaskedLM(config), masked=True)


@family
def mamba() -> tuple[nn.Module, Batch]:
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, state_size=4, use_cache=False, **SPECIAL
    )
    return _text(hf.MambaForCausalLM(config))


@family
def whisper() -> tuple[nn.Module, Batch]:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=HIDDEN, decoder_ffn_dim=HIDDEN, num_mel_bins=10,
        max_source_positions=15, max_target_positions=40, decoder_start_token_id=0, use_cache=False, dropout=0.0,
        **SPECIAL,
    )  # fmt: skip
    features = torch.randn(BATCH, 10, 30, generator=_random(4))
    return hf.WhisperForConditionalGeneration(config), {"input_features": features, "labels": labels()}


@family
def mixtral() -> tuple[nn.Module, Batch]:
    config = hf.MixtralConfig(**_DECODER, num_key_value_heads=1, num_local_experts=4, output_router_logits=True)
    return _text(hf.MixtralForCausalLM(config))


@family
def gpt2_dropout() -> tuple[nn.Module, Batch]:
    """With the dropout it comes with."""
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    return _text(hf.GPT2LMHeadModel(config))


@family
def bert_dropout() -> tuple[nn.Module, Batch]:
    """With the dropout it comes with."""
    return _text(
        hf.BertForMaskedLM(hf.BertConfig(**_SIZES, intermediate_size=HIDDEN, max_position_embeddings=40)), masked=True
    )


@family
def switch_transformers() -> tuple[nn.Module, Batch]:
    """Its experts are gone through in a loop over those that some token chose."""
    config = hf.SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=HIDDEN, expert_capacity=4, num_layers=2, num_heads=HEADS,
        num_sparse_encoder_layers=1, num_decoder_layers=2, num_sparse_decoder_layers=1, num_experts=4,
        dropout_rate=0.0, router_jitter_noise=0.0, decoder_start_token_id=0, pad_token_id=2, eos_token_id=1,
        use_cache=False,
    )  # fmt: skip
    return _text(hf.SwitchTransformersForConditionalGeneration(config), masked=True)
