"""What trainers of published rows do in a step in addition to training, which no layout holds.

*Metrics.* Composer, which llm-foundry trains with, evaluates training metrics on the logits of every microbatch after
its backward (github.com/mosaicml/composer, `trainer.py`, `_train_microbatch`); of llm-foundry's models these are by
default `LanguageCrossEntropy` and `LanguagePerplexity` (`use_train_metrics`). Each is torch's own cross entropy under
autocast: logits are copied to fp32, and a table of their log-probabilities is written, without gradients. By then
backward has freed what layers kept, so that the two tables do not add to the peak of memory.

*Stalls of DeepSpeed's ZeRO-3 of 2021.* Its `partition_parameters.py` (versions with `flat_tensor = torch.zeros(...)`)
gathers one weight at a time: it fills a new tensor with zeros, waits for the device (`torch.cuda.synchronize`), and
calls `all_gather` with a list of as many views as there are ranks. Torch (`ProcessGroupNCCL.cpp`, until there was
`all_gather_into_tensor`) gathers into a second new tensor, and copies it to the list, view by view; `reduce_scatter`
does the same the other way. Nothing is sent or computed meanwhile. On eight V100s such lists made a gather of 4.3 GB
take 140 ms in place of 30 (pytorch/pytorch pull request 33924).

How long these stalls take is not taken from the rows that are priced, but from what removing them gained elsewhere:
DeepSpeed's pull request 1453 of October 2021, which prefetches weights and gathers without lists. A model of 52B
parameters on 64 A100s went from 67.61 to 116.06 TFLOP/s of each. What it gained beyond the network's time, even if
all of that is hidden now, is the least that stalls took, as far as gathers and reductions are all that it made faster.
Its model of 10B gives 24 ps of each byte, this one 17.

*Experts of GPT-OSS in Megatron-Core.* Two parts of its experts are operations of their own where no kernel has the
whole block (that of MXFP8, `cutedsl_fused_grouped_mlp`). Both halves of what the activation takes are clamped and
joined before the fused activation (`fusions/fused_bias_geglu.py`, `weighted_bias_quick_geglu_impl`), once more where
recipes recompute it (`moe_act`). The second bias is multiplied by each row's weight, which is in fp32, and added
expert by expert (`moe/experts.py`, `_apply_bias`); the first is added by the product. Counted are the bytes that these
read and write by torch's rules for dtypes, forward and backward, and the rows read for the sum of the first bias's
gradient.

*Activations of experts in Megatron-Core*, where no kernel has the whole block. Gradients of both halves are joined by
one kernel that torch.compile makes (`fused_bias_swiglu.py`, `weighted_swiglu_back`): for each half it reads the
gradient once more, and the first half of the operand. That of a row's weight, a sum, is a kernel of its own, which
reads operand and gradient again. Where recipes recompute the activation (`moe_act`) it runs once more.

*Normalised heads in Megatron-Core.* Queries and keys are normalised by one kernel and turned by another; the emulator
takes both for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autopar.cluster.description import Cluster
from autopar.layout import Layout
from benchmarks.emulator.sections.experts import BETWEEN

from .published_recipes import WHOLE
from .published_shape import Experts, Shape, number
from .published_systems import ZERO_OF_2021, system

WITH_METRICS = r"llm-foundry"
METRICS = 2
# Of a logit: read in two bytes, written and read in fp32, its log-probability written in fp32.
BYTES = 2 + 4 + 4 + 4


def metrics_seconds(row: Mapping[str, Any], cluster: Cluster, logits: float) -> float:
    """Seconds of a step spent on metrics, by memory bandwidth; ``logits`` is how many a device computes a step."""
    if not re.search(WITH_METRICS, system(row)):
        return 0.0
    return METRICS * BYTES * logits / cluster.device.memory_bandwidth


# Of DeepSpeed's pull request 1453: parameters; tokens of a step on each device (16 samples of 512); FLOP/s without what
# is computed again, before and after; bytes per second of a node's four adapters of 100 Gb/s, at the presets' 95%.
PARAMETERS, TOKENS, BEFORE, AFTER, NETWORK = 52e9, 16 * 512, 67.61e12, 116.06e12, 0.95 * 4 * 100e9 / 8


def sharded_bytes(parameters: float, recomputes: bool) -> float:
    """Bytes of weights that are gathered for a microbatch, and of gradients that are reduced, in 16 bits."""
    gathers = 3 if recomputes else 2
    return 2 * parameters * (gathers + 1)


def stall_of_a_byte() -> float:
    """Seconds that DeepSpeed's ZeRO-3 of 2021 stalled for each byte that it gathered or reduced."""
    sent = sharded_bytes(PARAMETERS, recomputes=True)
    gained = 6 * PARAMETERS * TOKENS * (1 / BEFORE - 1 / AFTER)
    return (gained - sent / NETWORK) / sent


def stalled_seconds(row: Mapping[str, Any], layout: Layout, batch: int) -> float:
    """Seconds of a step in which a row's library neither computed nor sent."""
    if not re.search(ZERO_OF_2021, system(row), re.DOTALL):
        return 0.0
    microbatches = batch // (layout.data * layout.microbatch)
    sent = sharded_bytes(number(row["model"], "params"), layout.recompute == "full")
    return microbatches * sent * stall_of_a_byte()


# Megatron-Bridge's recipes of GPT-OSS without that kernel (in MXFP8 the one on B300, which is that of bf16 but for its
# products), and those that recompute the activation.
IN_OPERATIONS, RECOMPUTED = r"megatron-bridge.*gpt oss.*( bf16| b300 x\d+ mxfp8)", r"gpt oss.* (g?b200|h100) "
# Bytes of an element that the activation gives: two halves clamped, and joined, in 16 bits; backward each clamp reads
# its operand too, and the gradients of both halves are joined.
CLAMPED, CLAMPED_BACKWARD = 2 * (2 + 2) + 2 * (2 + 2), 2 * (2 + 2 + 2) + 2 * (2 + 2)
# Bytes of an element of a row that leaves its expert: the bias times the weight is written; the row and that are read,
# their sum written; joined; cast. Backward the gradient is cast; cast back for the row, and joined; multiplied by the
# weight and summed for the bias; multiplied by the bias and summed for the weight.
WEIGHTED, WEIGHTED_BACKWARD = 4 + (2 + 4 + 4) + (4 + 4) + (4 + 2), (2 + 4) + (4 + 2) + (2 + 2) + 2 * (4 + 4 + 4)
# Bytes of an element that the activation gives, of which its operand has two: read for the first bias's gradient.
SUMMED = 2 * 2
# Of Megatron-Bridge's mixtures those that have a kernel for the whole block (`cutedsl_fused_grouped_mlp`): in MXFP8
# since release 26.06, where a whole iteration is one graph.
WHOLE_BLOCK = WHOLE
# Bytes of an element that the activation gives, beyond one kernel that reads the operand and the gradient: the gradient
# and the first half once more for the second half of the result; gradient and operand for that of the row's weight.
JOINED = (2 + 2) + (2 + 2 * 2)
# Read and written where the activation is computed again.
ACTIVATED = 2 * 2 + 2


def rows_seconds(row: Mapping[str, Any], cluster: Cluster, experts: Experts | None, width: int, rows: float) -> float:
    """Seconds of a step spent on operations that others fuse, by the bandwidth of such kernels. ``rows`` of ``width``
    elements is how many a device's experts are sent in a step, in all layers."""
    words = system(row)
    if experts is None or "megatron-bridge" not in words or re.search(WHOLE_BLOCK, words, re.DOTALL):
        return 0.0
    is_again, is_apart = (bool(re.search(pattern, words, re.DOTALL)) for pattern in (RECOMPUTED, IN_OPERATIONS))
    moved = experts.ffn * (JOINED + is_again * ACTIVATED)
    if is_apart:
        moved += experts.ffn * (CLAMPED * (1 + is_again) + CLAMPED_BACKWARD + SUMMED)
        moved += width * (WEIGHTED + WEIGHTED_BACKWARD)
    return rows * moved / (BETWEEN * cluster.device.memory_bandwidth)


# Bytes of an element of a query or key that two kernels read and write beyond one, forward and backward.
NORMED = 2 * (2 + 2)


def heads_seconds(row: Mapping[str, Any], cluster: Cluster, shape: Shape, tokens: float) -> float:
    """Seconds of a step spent on queries and keys that are normalised apart; ``tokens``: of a device, in all layers."""
    if not shape.normed_heads or "megatron-bridge" not in system(row):
        return 0.0
    elements = tokens * (shape.heads + shape.kv_heads) * shape.head_dim
    return NORMED * elements / cluster.device.memory_bandwidth
