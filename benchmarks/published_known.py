"""What sources say elsewhere of rows that leave it out: dims of models, batches, how FLOPs were counted.

Only what is written down in the source's own repository or article, named at each entry, and never what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from . import published_alpa
from .published_shape import NotExpressible, filled, number

Row = Mapping[str, Any]
# MaxText's base.yml, and how many of its dims double with `global_parameter_scale` (pyconfig.get_individual_scales):
# heads and the MLP's width first, then the model's width, then layers.
MAXTEXT = {"hidden": 2048, "heads": 16, "ffn": 7168, "layers": 16}


# What the configurations of open models (their ``config.json``) say of architecture that rows leave out, by words of
# their names: DeepSeek-V3 chooses a token's experts from 4 of 8 groups (``n_group``, ``topk_group``); Qwen3 normalises
# the queries and keys of each head; GPT-OSS has biases (``attention_bias``).
MODELS: Mapping[str, Mapping[str, Any]] = {
    r"deepseek.?v3": {"expert_groups": 8, "chosen_groups": 4},
    r"qwen.?3": {"normed_heads": True},
    r"gpt.?oss": {"attention_bias": True},
}


def completed(row: Row) -> Row:
    """The row with what its source or its model's configuration says; what the row itself says stays."""
    source = str(row.get("source")).lower()
    completes = (complete for word, complete in SOURCES.items() if word in source)
    return _of_model(next(completes, lambda same: same)(row))


def _of_model(row: Row) -> Row:
    name = f"{row['model'].get('name')} {row.get('row')}"
    for pattern, fields in MODELS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return filled(row, model=fields)
    return row


def _maxtext(row: Row) -> Row:
    if number(row["cluster"], "slices", 1) > 1:
        raise NotExpressible(
            "several slices: weights are divided within each and whole across them, which no layout is"
        )
    # Between products activations are divided over tensor ranks (`activation_embed` in configs/base.yml: by features,
    # which takes the collectives and the memory of a division by sequence).
    row = filled(_with_recomputation(row), parallel={"sequence_parallel": True})
    if not row["model"].get("global_parameter_scale"):
        return row
    doublings = number(row["model"], "global_parameter_scale").bit_length() - 1
    base, rest = divmod(doublings, 3)
    times = {"hidden": base + (rest > 1), "heads": base + (rest > 0), "ffn": base + (rest > 0), "layers": base}
    dims = {name: MAXTEXT[name] << times[name] for name in MAXTEXT}
    more = {"head_dim": 128, "mlp": "swiglu", "vocab": 32000}
    # per_device_batch counts tensor ranks as devices, and there is one microbatch.
    batch, data = number(row["parallel"], "global_batch"), number(row["parallel"], "d")
    parallel, measured = {"microbatch": max(1, batch // data)}, {"flops_convention": "6N+causal"}
    return filled(row, model={**dims, **more}, parallel=parallel, measured=measured)


def _with_recomputation(row: Row) -> Row:
    """MaxText's checkpoint policies (`layers/decoders.py`) in the words of layouts: ``minimal`` ones keep the results
    of products and make all else again. No layout keeps only some products, on the device or the host: the nearest
    computes everything again, which is too much by the products that are kept."""
    said = str(row["parallel"].get("recompute") or "none")
    kept_in_part = "offloaded" in said or said.startswith("save_")
    nearest = "elementwise" if said.startswith("minimal") else "full" if kept_in_part else said
    return {**row, "parallel": {**row["parallel"], "recompute": nearest}}


def _megatron_core(row: Row) -> Row:
    """Its strong scaling ends at the aggregate FLOP/s of its weak scaling, so both count alike. Its README says of both
    that reductions over data ranks, gathers of their weights, and collectives over tensor ranks overlap."""
    parallel = {"zero_stage": 1, "sequence_parallel": True, "ddp_overlap": True, "tp_comm_overlap": True}
    return filled(row, parallel=parallel, measured={"flops_convention": "megatron_model"})


def _deepseek(row: Row) -> Row:
    raise NotExpressible("schedule DualPipe: stages fed from both ends, exchanges under computing; no layout has it")


def _engineering(row: Row) -> Row:
    """Its notes say of the table: FLOPs of the model, causal attention, nothing computed again."""
    return filled(row, measured={"flops_convention": "arch_causal"})


SOURCES: Mapping[str, Callable[[Row], Row]] = {
    "alpa osdi": published_alpa.completed,
    "maxtext": _maxtext,
    "megatron-core r0.8.0": _megatron_core,
    "deepseek-v3": _deepseek,
    "when-to-upgrade-gpus": _engineering,
}
