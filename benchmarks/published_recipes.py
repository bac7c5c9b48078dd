"""What the recipes of NeMo's published mixtures of experts say beyond the rows, as read in Megatron-Bridge
(``scripts/performance``, its release notes, and the notes below its tables)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .published_shape import number

# The host starts all of an iteration as one graph (a program without branches: rows are not counted on the host), and
# rows overlap with another microbatch. Mixtures in MXFP8 run so since release 26.06 where a rack is one node, and
# Qwen3 on B300; of the rest some of a layer's modules are graphs, or none is.
WHOLE = r"\(26\.(0[6-9]|1\d)\S* .*((deepseekv3|gpt oss|qwen3).* gb[23]00|qwen3.* b300) .*mxfp8"
GRAPHS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (WHOLE, ("*",)),
    (r"deepseekv3.* gb200|gpt oss.* [bg]*300|qwen3.* b200", ("*attention*", "*norm*", "*router*")),
    (r"qwen3", ("*router*",)),
)
# Exchanges beside another microbatch without graphs of whole iterations: DeepSeek-V3 on B200 in two chunks a stage,
# Qwen3 235B on H100, GPT-OSS on GB200 in bf16 since release 26.04 (``moe_a2a_overlap``).
BESIDE = WHOLE + r"|deepseekv3.* b200 .* v2 |qwen3_235b.* h100|\(26\.04.*gpt oss.* gb200.* bf16"
# Whose rows are sent as rows: GPT-OSS in bf16 by all-to-all where nothing else is said. Release 26.04 took HybridEP on
# GB200, B200 and B300 (pull requests 2906 and 2915), 26.04.01 the all-to-all again on the first two (3561 and 3614).
BY_ROWS = r"gpt oss.* (h100|gb300.* bf16)|\(26\.04\.01.*gpt oss.* g?b200.* bf16|^(?!.*\(26\.04).*gpt oss.* bf16"

# GPT-OSS in MXFP8 on racks: attention (``fp8_dot_product_attention``) and the head (``fp8_output_proj``) too. On B300
# it is the recipe of bf16 with products in MXFP8 (``perf_recipes/gpt_oss``).
OSS = r"gpt oss.* "
IN_MXFP8 = OSS + r"gb[23]00 x\d+ mxfp8"
# Rates of cuDNN's attention of GPT-OSS (heads of 64; "masked": a window of 128 of 4096 tokens), relative to what
# presets have without a mask. NVIDIA measured (cudnn-frontend, ``benchmark/*/results/gpt_oss``: gb200/20260424,
# gb300/20260613, h200/20260818; two samples of 128 heads; milliseconds forward and backward) in bf16 0.210 and 0.465 on
# GB200, 0.193 and 0.439 on GB300, 0.264 and 0.917 on H200; in MXFP8 0.210 and 2.080, 0.174 and 1.872. Models here
# compute 6.87e10 and 1.718e11 FLOPs of it, a block of keys and the one before. Presets have 1021 and 458 TFLOP/s on
# Blackwell's racks and Hopper with heads of 64. MXFP8's backward computes all keys, not only the window's (its
# time is quadratic in the tokens), which gives it its rate without a window, too: 1.374e12 FLOPs in that time.
ATTENTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    (IN_MXFP8.replace("[23]", "2"), ("plain:1.0:0.65", "masked:0.32:0.081")),
    (IN_MXFP8.replace("[23]", "3"), ("plain:1.0:0.72", "masked:0.39:0.090")),
    (OSS + r"g?b200 ", ("masked:0.32:0.36",)),
    (OSS + r"g?b300 ", ("masked:0.35:0.38",)),
    (OSS + r"h100 ", ("masked:0.57:0.41",)),
)
# Release 26.06.01 had a kernel of cuDNN for the gradients of the activation and the first bias that had become slow
# (notes of Megatron-Bridge 0.5.1; cudnn-frontend issue 256: 1362.768 us, 155.632 us once mended in pull request 322).
SLOWED = r"\(26\.06\.01 .*" + IN_MXFP8
SLOWNESS = 1362.768 / 155.632


# What recipes compute again of mixtures (``recompute_modules``): the projections of latent attention (``mla_up_proj``),
# but on GB300 where a whole iteration is one graph or in bf16; of the first, dense layers also ``mlp``; of GPT-OSS
# ``layernorm``. The results of experts' activations (``moe_act``) are never kept.
KEPT = WHOLE.replace("gb[23]00", "gb300") + r"|gb300.* bf16"
AGAIN: tuple[tuple[str, tuple[str, ...]], ...] = (
    (rf"^(?!.*({KEPT})).*(deepseekv3|kimi)", ("*.attention.up*",)),
    (r"gpt oss.*( gb?200.* bf16| b200| h100)", ("*.norm1", "*.norm2")),
)
AGAIN_DENSE = r"(deepseekv3|kimi).* h100|deepseekv3.* b200 .* v2 "


def recomputed(words: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that are computed again."""
    found = [module for pattern, modules in AGAIN if re.search(pattern, words, re.DOTALL) for module in modules]
    if re.search(AGAIN_DENSE, words):
        found += [f"layers.{layer}.mlp*" for layer in range(int(row["model"].get("dense_layers") or 0))]
    return tuple(found)


def recipe(words: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the layout of a mixture of experts; ``words``: what is said of the row's system."""
    if "megatron-bridge" not in words or not row["model"].get("experts"):
        return {}
    found: dict[str, Any] = {
        "dispatch": "rows" if re.search(BY_ROWS, words) else "tokens",
        "cuda_graphs": next((modules for pattern, modules in GRAPHS if re.search(pattern, words)), ()),
        "recomputed": recomputed(words, row),
        "attention": next((rates for pattern, rates in ATTENTION if re.search(pattern, words)), ()),
        "fp8_head": bool(re.search(IN_MXFP8, words)),
        "activation_gradient": SLOWNESS if re.search(SLOWED, words) else 1.0,
    }
    return found


# Whose weights rest in fp8 alone where products take them so: recipes gather them (``perf_recipes/_common.py``,
# ``fp8_param_gather``), but for Muon, Kimi K2's optimizer; NVIDIA's scripts for MLPerf do from 4.0 on (`FP8_PARAMS`).
IN_FP8 = r"megatron-bridge(?!.*kimi)|mlperf training v[4-9]"


# Of how many layers recipes of FSDP keep on the host what backward takes (``cpu_offloading_num_layers``).
OFFLOADED = (
    (r"llama3_70b gb300 .*bf16", 30),
    (r"llama3_70b gb300", 20),
    (r"llama3_70b gb200 .*bf16", 20),
    (r"llama3_70b gb200", 40),
    (r"llama3_70b b200", 5),
    (r"llama3.1_405b gb300 .*bf16", 40),
    (r"llama3.1_405b gb300", 10),
    (r"llama3.1_405b gb200", 92),
)


def resting(words: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the layout that say how weights, gradients and optimizer states rest, of dense models too. Recipes
    reduce gradients in bf16; the optimizer is the precision-aware one in bf16, and always of DeepSeek-V3, whose moments
    are in bf16; segments expand but under FSDP, whose buffers may be registered with NCCL."""
    precision, is_sharded = str(row["parallel"].get("precision")).lower(), bool(row["parallel"].get("fsdp"))
    found: dict[str, Any] = {"weights": "fp8"} if "fp8" in precision and re.search(IN_FP8, words, re.DOTALL) else {}
    if "megatron-bridge" not in words:
        return found
    found["gradients"] = "own"
    if not is_sharded:
        found["allocation"] = "expandable"
        found.update({"masters": "remainder"} if precision == "bf16" else {})
    else:
        found["offload_layers"] = next((count for pattern, count in OFFLOADED if re.search(pattern, words)), 0)
    if "kimi" in words:
        found["moments"] = 1
    if "deepseekv3" in words:
        found["states"] = "bf16"
    return found


def beside(words: str) -> bool:
    """Whether rows are sent to their experts beside another microbatch."""
    return "megatron-bridge" in words and bool(re.search(BESIDE, words))


def beyond(row: Mapping[str, Any]) -> int:
    """How many tokens beyond the next one a row's model predicts: DeepSeek-V3 one, since release 25.11 unless said."""
    words = str(row.get("source")) + str(row.get("row"))
    return int(bool(re.search(r"\((25\.1[01]|26).*DeepSeekV3", words)) and "w/o MTP" not in words)


def cut(row: Mapping[str, Any], chunks: int) -> dict[str, int]:
    """As how many layers the ends of a mixture count: recipes fill the last chunk up with the head, and chunks of two
    layers also the first with the embedding (``Et*4|(t*4|)*14tmL``, ``Et|(tt|)*30mL``)."""
    if "megatron-bridge" not in str(row.get("source")).lower() or not row["model"].get("experts") or chunks == 1:
        return {}
    layers = number(row["model"], "layers")
    missing, each = -layers % chunks, -(-layers // chunks)
    return {"embedding_as_layers": max(0, missing - each), "head_as_layers": min(missing, each)}
