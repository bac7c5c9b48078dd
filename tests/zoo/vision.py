"""Models of Hugging Face that see: images, video, and images with text."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from .decoders import BATCH, GROUPED, LENGTH, SIZES, WORDS
from .hugging_face import FAMILIES, NO_DROPOUT, SPECIAL, Batch, family, floats, tokens

CLASSES = 10
PATCHES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def classifier(name: str, kind: str, sizes: dict[str, Any], image: int = 32, **more: Any) -> None:
    """Registers ``<kind>ForImageClassification`` on square images of that many pixels a side."""

    def make() -> tuple[nn.Module, Batch]:
        config = getattr(hf, f"{kind}Config")(**(sizes | {"num_labels": CLASSES} | more))
        batch = {"pixel_values": floats(BATCH, 3, image, image), "labels": torch.arange(BATCH) % CLASSES}
        return getattr(hf, f"{kind}ForImageClassification")(config), batch

    FAMILIES[name] = make


classifier("vit", "ViT", PATCHES | NO_DROPOUT)
classifier("deit", "DeiT", PATCHES | NO_DROPOUT)
classifier("beit", "Beit", PATCHES | NO_DROPOUT, drop_path_rate=0.0, use_relative_position_bias=True)
classifier("data2vec_vision", "Data2VecVision", PATCHES | NO_DROPOUT, drop_path_rate=0.0)
classifier("dinov2", "Dinov2", PATCHES | NO_DROPOUT, mlp_ratio=2)
classifier("dinov2_registers", "Dinov2WithRegisters", PATCHES | NO_DROPOUT, mlp_ratio=2, num_register_tokens=2)
classifier("vit_msn", "ViTMSN", PATCHES | NO_DROPOUT)
classifier("ijepa", "IJepa", PATCHES | NO_DROPOUT)
classifier("siglip_vision", "Siglip", {}, vision_config=PATCHES, text_config={})
classifier("resnet", "ResNet", {}, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="bottleneck")
classifier("regnet", "RegNet", {}, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8)
classifier("convnextv2", "ConvNextV2", {}, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2)
classifier("mobilenet_v1", "MobileNetV1", {}, image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.0)
classifier("mobilenet_v2", "MobileNetV2", {}, image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.0)
classifier("efficientnet", "EfficientNet", {}, image_size=32, width_coefficient=0.25, depth_coefficient=0.25,
           dropout_rate=0.0, drop_connect_rate=0.0, hidden_dim=320)  # fmt: skip
classifier("mobilevit", "MobileViT", {}, 32, image_size=32, hidden_sizes=[24, 32, 40], num_attention_heads=4,
           neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
           classifier_dropout_prob=0.0)  # fmt: skip
classifier("swinv2", "Swinv2", NO_DROPOUT, image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4],
           window_size=4, drop_path_rate=0.0)  # fmt: skip
classifier("pvt", "Pvt", NO_DROPOUT, image_size=32, patch_sizes=[4, 2], strides=[4, 2], hidden_sizes=[16, 32],
           depths=[1, 1], num_encoder_blocks=2, num_attention_heads=[2, 4], mlp_ratios=[2, 2],
           sequence_reduction_ratios=[2, 1], drop_path_rate=0.0)  # fmt: skip
classifier("cvt", "Cvt", {}, embed_dim=[16, 32], num_heads=[2, 4], depth=[1, 2], patch_sizes=[7, 3],
           patch_stride=[4, 2], patch_padding=[2, 1], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0],
           drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.0], qkv_bias=[True, True], cls_token=[False, True],
           qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2],
           padding_q=[1, 1], stride_q=[1, 1])  # fmt: skip
classifier("poolformer", "PoolFormer", {}, hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2,
           patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0, drop_path_rate=0.0)  # fmt: skip
classifier("focalnet", "FocalNet", {}, image_size=32, patch_size=4, embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1],
           focal_levels=[2, 2], focal_windows=[3, 3], drop_path_rate=0.0)  # fmt: skip
classifier("levit", "Levit", {}, image_size=32, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 2, 2],
           depths=[1, 1, 1], key_dim=[8, 8, 8], mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2],
           drop_path_rate=0)  # fmt: skip
classifier("bit", "Bit", {}, embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=8)
classifier("hiera", "Hiera", {}, image_size=[32, 32], embed_dim=16, depths=[1, 1], num_heads=[1, 2],
           patch_stride=[4, 4], patch_size=[7, 7], patch_padding=[3, 3], masked_unit_size=[4, 4],
           num_query_pool=1, mlp_ratio=2.0, drop_path_rate=0.0)  # fmt: skip


@family
def videomae() -> tuple[nn.Module, Batch]:
    config = hf.VideoMAEConfig(**PATCHES, **NO_DROPOUT, num_frames=4, tubelet_size=2, num_labels=CLASSES)
    batch = {"pixel_values": floats(BATCH, 4, 3, 32, 32), "labels": torch.arange(BATCH) % CLASSES}
    return hf.VideoMAEForVideoClassification(config), batch


@family
def timesformer() -> tuple[nn.Module, Batch]:
    config = hf.TimesformerConfig(**PATCHES, **NO_DROPOUT, num_frames=4, num_labels=CLASSES, drop_path_rate=0)
    batch = {"pixel_values": floats(BATCH, 4, 3, 32, 32), "labels": torch.arange(BATCH) % CLASSES}
    return hf.TimesformerForVideoClassification(config), batch


@family
def dpt() -> tuple[nn.Module, Batch]:
    config = hf.DPTConfig(
        **PATCHES | NO_DROPOUT | {"num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], num_labels=5,
        neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, semantic_classifier_dropout=0.0,
        readout_type="project", is_hybrid=False,
    )  # fmt: skip
    target = tokens(BATCH, 32 * 32, 5).view(BATCH, 32, 32)
    return hf.DPTForSemanticSegmentation(config), {"pixel_values": floats(BATCH, 3, 32, 32), "labels": target}


@family
def glpn() -> tuple[nn.Module, Batch]:
    config = hf.GLPNConfig(
        num_encoder_blocks=4, depths=[1, 1, 1, 1], sr_ratios=[4, 2, 1, 1], hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 3, 4], mlp_ratios=[2, 2, 2, 2], decoder_hidden_size=16, drop_path_rate=0.0,
        **NO_DROPOUT,
    )  # fmt: skip
    batch = {"pixel_values": floats(BATCH, 3, 32, 32).abs(), "labels": floats(BATCH, 32, 32).abs() + 0.1}
    return hf.GLPNForDepthEstimation(config), batch


@family
def upernet() -> tuple[nn.Module, Batch]:
    backbone = hf.ConvNextConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    config = hf.UperNetConfig(
        backbone_config=backbone, hidden_size=16, num_labels=5, auxiliary_in_channels=24, auxiliary_channels=8,
        pool_scales=[1, 2],
    )  # fmt: skip
    target = tokens(BATCH, 64 * 64, 5).view(BATCH, 64, 64)
    return hf.UperNetForSemanticSegmentation(config), {"pixel_values": floats(BATCH, 3, 64, 64), "labels": target}


@family
def siglip() -> tuple[nn.Module, Batch]:
    text = {**SIZES, **SPECIAL, "intermediate_size": 96, "max_position_embeddings": LENGTH}
    model = hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=PATCHES))
    pixels = floats(BATCH, 3, 32, 32)
    return model, {"input_ids": tokens(BATCH, LENGTH, WORDS), "pixel_values": pixels, "return_loss": True}


@family
def blip() -> tuple[nn.Module, Batch]:
    text = {**SIZES, **SPECIAL, **NO_DROPOUT, "intermediate_size": 96, "max_position_embeddings": 40}
    config = hf.BlipConfig(
        text_config=text | {"encoder_hidden_size": 64, "projection_dim": 32}, vision_config=PATCHES, projection_dim=32
    )
    ids = tokens(BATCH, LENGTH, WORDS)
    return hf.BlipForConditionalGeneration(config), {
        "pixel_values": floats(BATCH, 3, 32, 32), "input_ids": ids, "labels": ids.clone(),
    }  # fmt: skip


@family
def vilt() -> tuple[nn.Module, Batch]:
    config = hf.ViltConfig(**PATCHES | NO_DROPOUT, vocab_size=WORDS, num_labels=CLASSES, max_position_embeddings=40)
    batch = {
        "input_ids": tokens(BATCH, LENGTH, WORDS), "pixel_values": floats(BATCH, 3, 32, 32),
        "labels": floats(BATCH, CLASSES).sigmoid(),
    }  # fmt: skip
    return hf.ViltForQuestionAnswering(config), batch


@family
def llava() -> tuple[nn.Module, Batch]:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**PATCHES), text_config=hf.LlamaConfig(**GROUPED), image_token_id=1,
        vision_feature_layer=-1,
    )  # fmt: skip
    ids = tokens(BATCH, 24, WORDS)
    labels = ids.clone()
    ids[:, :16] = 1
    return hf.LlavaForConditionalGeneration(config), {
        "input_ids": ids, "pixel_values": floats(BATCH, 3, 32, 32), "labels": labels,
    }  # fmt: skip


class Squares(nn.Module):
    """A model without a loss of its own, and the mean of the squares of what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(pixel_values=pixel_values).last_hidden_state
        return hidden.square().mean()


def _dinov3() -> tuple[nn.Module, Batch]:
    """Its rotary embedding counts centres of patches, ``arange(0.5, size)``."""
    config = hf.DINOv3ViTConfig(**PATCHES, num_register_tokens=2, drop_path_rate=0.0)
    return Squares(hf.DINOv3ViTModel(config)), {"pixel_values": floats(BATCH, 3, 32, 32)}


FAMILIES["dinov3"] = _dinov3
