"""Encoders and encoder-decoders of Hugging Face: text, speech and both."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from .decoders import BATCH, LENGTH, SIZES, WORDS, labelled
from .hugging_face import FAMILIES, NO_DROPOUT, SPECIAL, Batch, family, floats, tokens

ENCODER: dict[str, Any] = {**SIZES, **NO_DROPOUT, "intermediate_size": 96, "max_position_embeddings": 40}
HALVES: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dropout": 0.0, "use_cache": False,
    "max_position_embeddings": 40, "decoder_start_token_id": 0, "forced_eos_token_id": 1, **SPECIAL,
}  # fmt: skip


def text(name: str, kind: str, sizes: dict[str, Any], **more: Any) -> None:
    """Registers the class ``kind`` (``Model|Config``) with token ids that are their own labels, and a mask."""
    model, _, config = kind.partition("|")

    def make() -> tuple[nn.Module, Batch]:
        made, batch = labelled(getattr(hf, model)(getattr(hf, config)(**(sizes | more))))
        assert isinstance(batch, dict)
        lengths = torch.full((BATCH, 1), LENGTH)
        lengths[1::2] -= 5
        return made, batch | {"attention_mask": (torch.arange(LENGTH)[None] < lengths).long()}

    FAMILIES[name] = make


text("bert", "BertForMaskedLM|BertConfig", ENCODER)
text("distilbert", "DistilBertForMaskedLM|DistilBertConfig", {}, vocab_size=WORDS, dim=64, n_layers=2, n_heads=4,
     hidden_dim=96, dropout=0.0, attention_dropout=0.0, max_position_embeddings=40)  # fmt: skip
text("albert", "AlbertForMaskedLM|AlbertConfig", ENCODER, embedding_size=32)
text("mpnet", "MPNetForMaskedLM|MPNetConfig", ENCODER | SPECIAL)
text("camembert", "CamembertForMaskedLM|CamembertConfig", ENCODER | SPECIAL)
text("xlm_roberta", "XLMRobertaForMaskedLM|XLMRobertaConfig", ENCODER | SPECIAL)
text("mobilebert", "MobileBertForMaskedLM|MobileBertConfig", ENCODER, embedding_size=32, true_hidden_size=32,
     intra_bottleneck_size=32, num_feedforward_networks=2)  # fmt: skip
text("squeezebert", "SqueezeBertForMaskedLM|SqueezeBertConfig", ENCODER, embedding_size=64, q_groups=2, k_groups=2,
     v_groups=2, post_attention_groups=1, intermediate_groups=2, output_groups=2)  # fmt: skip
text("convbert", "ConvBertForMaskedLM|ConvBertConfig", ENCODER, embedding_size=64, head_ratio=2, conv_kernel_size=3)
text("modernbert", "ModernBertForMaskedLM|ModernBertConfig", SIZES | SPECIAL, intermediate_size=96,
     embedding_dropout=0.0, mlp_dropout=0.0, attention_dropout=0.0, local_attention=8, cls_token_id=0,
     sep_token_id=1)  # fmt: skip
text("funnel", "FunnelForMaskedLM|FunnelConfig", {}, vocab_size=WORDS, block_sizes=[1, 1], d_model=64, n_head=4,
     d_head=16, d_inner=96, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
     num_decoder_layers=1)  # fmt: skip
text("big_bird_full", "BigBirdForMaskedLM|BigBirdConfig", ENCODER, attention_type="original_full")
text("big_bird_sparse", "BigBirdForMaskedLM|BigBirdConfig", ENCODER | {"max_position_embeddings": 128},
     attention_type="block_sparse", block_size=2, num_random_blocks=1)  # fmt: skip
text("longformer", "LongformerForMaskedLM|LongformerConfig", ENCODER | SPECIAL, attention_window=8)
text("roformer", "RoFormerForMaskedLM|RoFormerConfig", ENCODER)
text("prophetnet", "ProphetNetForConditionalGeneration|ProphetNetConfig", SPECIAL, vocab_size=WORDS, hidden_size=64,
     encoder_ffn_dim=96, num_encoder_layers=2, num_encoder_attention_heads=4, decoder_ffn_dim=96, num_decoder_layers=2,
     num_decoder_attention_heads=4, attention_dropout=0.0, dropout=0.0, activation_dropout=0.0,
     max_position_embeddings=40, ngram=2, num_buckets=8, relative_max_distance=16, use_cache=False)  # fmt: skip
text("mbart", "MBartForConditionalGeneration|MBartConfig", HALVES)
text("pegasus", "PegasusForConditionalGeneration|PegasusConfig", HALVES)
text("marian", "MarianMTModel|MarianConfig", HALVES)
text("blenderbot", "BlenderbotForConditionalGeneration|BlenderbotConfig", HALVES)
text("m2m_100", "M2M100ForConditionalGeneration|M2M100Config", HALVES, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
     attention_dropout=0.0)  # fmt: skip
text("led", "LEDForConditionalGeneration|LEDConfig", {k: v for k, v in HALVES.items() if "position" not in k},
     attention_window=8, max_encoder_position_embeddings=40, max_decoder_position_embeddings=40)  # fmt: skip
text("mt5", "MT5ForConditionalGeneration|MT5Config", {}, vocab_size=WORDS, d_model=64, d_kv=16, d_ff=96, num_layers=2,
     num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=2, use_cache=False)  # fmt: skip
text("switch_transformers", "SwitchTransformersForConditionalGeneration|SwitchTransformersConfig", {},
     vocab_size=WORDS, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
     num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, dropout_rate=0.0, router_jitter_noise=0.0,
     decoder_start_token_id=0, pad_token_id=2, use_cache=False)  # fmt: skip
text("nllb_moe", "NllbMoeForConditionalGeneration|NllbMoeConfig", HALVES, num_experts=4, expert_capacity=40,
     encoder_sparse_step=2, decoder_sparse_step=2, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
     activation_dropout=0.0, attention_dropout=0.0, moe_token_dropout=0.0)  # fmt: skip


@family
def fnet() -> tuple[nn.Module, Batch]:
    sizes = {k: v for k, v in SIZES.items() if k != "num_attention_heads"}
    config = hf.FNetConfig(**sizes, intermediate_size=96, hidden_dropout_prob=0.0, max_position_embeddings=40)
    return labelled(hf.FNetForMaskedLM(config))


_SPEECH: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "activation_dropout": 0.0, "layerdrop": 0.0, "final_dropout": 0.0, "mask_time_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip


class Framewise(nn.Module):
    """A model of speech that is told the character of each frame."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.core(input_values).logits.transpose(1, 2), labels)


def speech(name: str, kind: str, **more: Any) -> None:
    """Registers a model from waveform to characters."""

    def make() -> tuple[nn.Module, Batch]:
        config = getattr(hf, f"{kind}Config")(**(_SPEECH | more))
        batch = {"input_values": floats(BATCH, 400), "labels": tokens(BATCH, 39, 32)}
        return Framewise(getattr(hf, f"{kind}ForCTC")(config)), batch

    FAMILIES[name] = make


speech("wav2vec2", "Wav2Vec2")
speech("wav2vec2_layer_norm", "Wav2Vec2", feat_extract_norm="layer", do_stable_layer_norm=True)
speech("hubert", "Hubert")
speech("wavlm", "WavLM", num_buckets=8, max_bucket_distance=16)
speech("unispeech", "UniSpeech", num_ctc_classes=32)


@family
def wav2vec2_ctc() -> tuple[nn.Module, Batch]:
    """With its own loss, over targets of different lengths."""
    labels = tokens(BATCH, 9, 32)
    labels[1::2, 6:] = -100
    config = hf.Wav2Vec2Config(**_SPEECH)
    return hf.Wav2Vec2ForCTC(config), {"input_values": floats(BATCH, 400), "labels": labels}


@family
def canine() -> tuple[nn.Module, Batch]:
    config = hf.CanineConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, max_position_embeddings=64,
        local_transformer_stride=8, num_hash_buckets=64, num_labels=3, **SPECIAL, **NO_DROPOUT,
    )  # fmt: skip
    batch = {"input_ids": tokens(BATCH, 32, 200), "labels": torch.arange(BATCH) % 3}
    return hf.CanineForSequenceClassification(config), batch


@family
def audio_spectrogram() -> tuple[nn.Module, Batch]:
    config = hf.ASTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, patch_size=8,
        frequency_stride=4, time_stride=4, max_length=32, num_mel_bins=16, num_labels=5, **NO_DROPOUT,
    )  # fmt: skip
    return hf.ASTForAudioClassification(config), {
        "input_values": floats(BATCH, 32, 16),
        "labels": torch.arange(BATCH) % 5,
    }


@family
def perceiver() -> tuple[nn.Module, Batch]:
    config = hf.PerceiverConfig(
        num_latents=12, d_latents=32, d_model=64, num_blocks=1, num_self_attends_per_block=2, vocab_size=WORDS,
        num_self_attention_heads=4, num_cross_attention_heads=4, qk_channels=32, v_channels=32,
        attention_probs_dropout_prob=0.0, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model, batch = labelled(hf.PerceiverForMaskedLM(config))
    assert isinstance(batch, dict)
    return model, {"inputs": batch["input_ids"], "labels": batch["labels"]}


@family
def patch_time_series() -> tuple[nn.Module, Batch]:
    config = hf.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, prediction_length=4, d_model=32,
        num_attention_heads=4, num_hidden_layers=2, ffn_dim=48, attention_dropout=0.0, ff_dropout=0.0, head_dropout=0.0,
        positional_dropout=0.0, path_dropout=0.0, loss="mse", num_targets=2,
    )  # fmt: skip
    batch = {"past_values": floats(BATCH, 32, 2), "future_values": floats(BATCH, 4, 2)}
    return hf.PatchTSTForPrediction(config), batch


@family
def time_series() -> tuple[nn.Module, Batch]:
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, input_size=1, lags_sequence=[1, 2], num_time_features=1,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, d_model=32, dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        attention_dropout=0.0, activation_dropout=0.0, use_cache=False,
    )  # fmt: skip
    past = floats(BATCH, 10)
    batch = {
        "past_values": past, "past_time_features": floats(BATCH, 10, 1), "past_observed_mask": torch.ones_like(past),
        "future_values": floats(BATCH, 4), "future_time_features": floats(BATCH, 4, 1),
    }  # fmt: skip
    return hf.TimeSeriesTransformerForPrediction(config), batch
