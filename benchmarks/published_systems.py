"""What is known of how the systems of published rows train, beyond what the rows say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .published_recipes import beside, recipe, resting


def system(row: Mapping[str, Any]) -> str:
    """What is said of who ran it: source, schedule and notes, and the row's own name."""
    words = (row.get("source"), row.get("row"), row["parallel"].get("schedule"), row.get("notes"))
    return " ".join(str(word) for word in words).lower()


# DeepSpeed's ZeRO-3 as of early 2021 (Narayanan et al., table 2).
ZERO_OF_2021 = r"narayanan.*zero-3\b"
# What is known of how a system trains, by a pattern of its source, name, schedule or notes.
HABITS: tuple[tuple[str, dict[str, Any]], ...] = (
    # Its loss is FlashAttention's fused cross entropy, by default (github.com/mosaicml/llm-foundry).
    ("llm-foundry", {"eager": ("embedding", "positions", "layers.*", "norm", "head")}),
    # Weights are gathered one by one as they are needed, after waiting for the device, and again before what is
    # computed again (its `partition_parameters.py`; :mod:`.published_beside` has what that costs beyond the network).
    (ZERO_OF_2021, {"gathers": "tensor", "overlap": ("message",)}),
    # BigScience went over to bf16, whose gradients are added up in fp32, when it also counted the embedding and the
    # head as a layer each; before, gradients were in fp16 as DeepSpeed keeps them (chronicles of tr11-176B).
    ("embedding-balanced", {"embedding_as_layers": 1, "head_as_layers": 1}),
    # github.com/Aleph-Alpha/scaling, its library as published in 2024: the embedding, the layers, the last norm and the
    # head are one list that is cut evenly; gradients are kept in bf16 and all-reduced in fp32 whatever ZeRO divides;
    # every tensor rank gathers all logits, and sends all of an activation. Its norms gather the sequence, and its
    # products keep what they take; without sequence parallelism each makes an all-reduce of its input's gradient.
    (
        "hagemann",
        {
            "gradients": "own",
            "replicated": ("*loss*",),
            "retained_inputs": ("*loss*",),
            "embedding_as_layers": 1,
            "head_as_layers": 2,
            "reduction": "all-fp32",
            "scatter": False,
            "operands": "whole",
            "separate_dgrad_reductions": ("*mlp.gate", "*mlp.up"),
        },
    ),
)


# Systems known to add gradients up within the products that make them, and to sum inputs' gradients over tensor ranks
# while weights' are computed: Megatron since the end of 2021.
FUSED_GRADIENTS = r"korthikanti|megascale|mlperf|nemo|megatron-core|megatron-bridge|llama 3"


def habits(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the layout that are known of a row's system."""
    found: dict[str, Any] = {}
    for word, known in HABITS:
        found.update(known if re.search(word, system(row), re.DOTALL) else {})
    if "(deepspeed)" in system(row) and row["parallel"].get("precision") == "fp16":
        found["gradients"] = "own"
    return {**found, **recipe(system(row), row), **resting(system(row), row)}


# Systems whose rows say nothing of the version of FlashAttention and had the first in Triton: llm-foundry's tables
# (`attn_impl`), made before the second was supported.
TRITON_FLASH = r"llm-foundry"
# Systems that have the second whatever the chip: torch's own attention.
SECOND_FLASH = r"torchtitan"


# Systems without a fused attention kernel, though described after there was one: MegaScale's baseline is Megatron-LM of
# January 2023, to which its table 3 adds the kernel.
UNFUSED = r"megatron-lm \d+ gpus"


# Systems that trained with dropout: Korthikanti et al. count its masks (section 4.1); Megatron's scripts of the time
# and BigScience's (tr11-176B-ml.slurm) leave it at the library's 0.1.
DROPOUT = r"narayanan|korthikanti|mt-nlg|bigscience"


# Systems whose pipelines send and receive one by one, blocking: DeepSpeed's, and Aleph Alpha's after it.
BLOCKING_MESSAGES = r"deepspeed|hagemann"


# Systems known to send tensor-parallel collectives in pieces beside the products next to them (of Megatron-Core its
# README, beside the table).
PIECEWISE = r"megascale \d+ gpus|megatron-core|megatron-bridge"


def overlap(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the row, or else what is known of its system, sends while devices compute. Weights of ZeRO-3 are
    prefetched by all; gradients are reduced under backward where the row says so, and by libraries since 2023. Messages
    between stages hold up only those who wait for them where libraries post sends and receives in pairs."""
    parallel = row["parallel"]
    recent = bool(re.search(r"H100|H800|H200|B200|B300|GB[23]00|TPU", str(row["cluster"].get("gpu", ""))))
    found = ["weight"] if re.search(BLOCKING_MESSAGES, system(row)) else ["weight", "message"]
    if parallel.get("ddp_overlap", recent):
        found.append("gradient")
    if re.search(FUSED_GRADIENTS, system(row)):
        found.append("input_gradient")
    if parallel.get("tp_comm_overlap") or parallel.get("async_tp") or re.search(PIECEWISE, system(row)):
        found += ["tensor", "gradient"]
    if beside(system(row)):
        found.append("expert")
    return tuple(dict.fromkeys(found))


# Systems whose cross entropy runs operation by operation in fp32: Megatron's until it was fused in 2024
# (`core/tensor_parallel/cross_entropy.py`), and Aleph Alpha's, torch's own on `logits.float()` (its library's
# `losses/cross_entropy.py`), whose pipeline holds the logits as a stage's output.
UNFUSED_LOSS = r"narayanan|korthikanti|mt-nlg|bigscience|hagemann|megatron-lm \d+ gpus"


# Systems whose rotary positions run operation by operation: Megatron-Core's where positions are scaled (YaRN, of
# GPT-OSS), since TransformerEngine's kernel multiplies by no factor (`rope_utils.py`, "mscale is not supported").
UNFUSED_ROTARY = r"megatron-bridge.*gpt oss"


def eager(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that run operation by operation: where a row names its kernels, all else, in torch's own operations."""
    loss = ("loss",) if re.search(UNFUSED_LOSS, system(row)) else ()
    turned = ("*.rotary",) if re.search(UNFUSED_ROTARY, system(row), re.DOTALL) else ()
    return tuple(dict.fromkeys((*_by_kernel(row), *loss, *turned)))


# Layers themselves, without the modules in them.
LAYERS = ("layers.[0-9]", "layers.[0-9][0-9]", "layers.[0-9][0-9][0-9]")


def _by_kernel(row: Mapping[str, Any]) -> tuple[str, ...]:
    kernel = str(row["parallel"].get("attention_kernel") or "")
    if not kernel:
        return ("*",) if row["parallel"].get("compile") is False else ()
    norms = () if "RMS" in kernel else ("*norm*",)
    scores = ("*scores*",) if kernel == "torch" else ()
    return ("*attention", "*rotary", "*mlp*", *LAYERS, *norms, *scores)
