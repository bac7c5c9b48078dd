"""What sources say elsewhere of rows that leave it out: dims of models, batches, how FLOPs were counted.

Only what is written down in the source's own repository or article, named at each entry, and never what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .published_open import method_name
from .published_shape import NotExpressible, number

Row = Mapping[str, Any]
# Alpa's ablation of intra-operator parallelism by number of devices (github.com/alpa-projects/alpa,
# benchmark/alpa/exp_intra_ablation.py): hidden width, heads, and experts of every other layer. All have 8 layers,
# sequences of 1024, one microbatch of 8 of them in all, fp16, and layers computed again.
ABLATION: Mapping[str, Mapping[int, dict[str, int]]] = {
    "gpt": {
        1: {"hidden": 2048, "heads": 16},
        2: {"hidden": 3072, "heads": 24},
        4: {"hidden": 4096, "heads": 32},
        8: {"hidden": 5760, "heads": 40},
    },
    "moe": {
        1: {"hidden": 1024, "heads": 32, "experts_every_other_layer": 8},
        2: {"hidden": 1280, "heads": 40, "experts_every_other_layer": 16},
        4: {"hidden": 1536, "heads": 24, "experts_every_other_layer": 16},
        8: {"hidden": 1536, "heads": 24, "experts_every_other_layer": 32},
    },
}
_ABLATION_OF = {
    "gpt": {"layers": 8, "seq": 1024, "vocab": 25600},
    "moe": {"layers": 8, "seq": 1024, "vocab": 51200, "top_k": 2, "expert_group_size": 1024},
}
# MaxText's base.yml, and how many of its dims double with `global_parameter_scale` (pyconfig.get_individual_scales):
# heads and the MLP's width first, then the model's width, then layers.
MAXTEXT = {"hidden": 2048, "heads": 16, "ffn": 7168, "layers": 16}


def completed(row: Row) -> Row:
    """The row with what its source says elsewhere; what the row itself says stays."""
    source = str(row.get("source")).lower()
    for word, complete in SOURCES.items():
        if word in source:
            return complete(row)
    return row


def _with(row: Row, **parts: Mapping[str, Any]) -> Row:
    """The row with these fields where it has none."""
    added = {
        part: {**more, **{name: value for name, value in row[part].items() if value is not None}}
        for part, more in parts.items()
    }
    return {**row, **added}


def _alpa(row: Row) -> Row:
    family, parallel = str(row.get("row")).partition(" ")[0], row["parallel"]
    if family == "wresnet":
        raise NotExpressible("a wide ResNet: no decoder of text")
    if "ablation" in str(row.get("table")) and family in ABLATION:
        devices = number(row["cluster"], "n_gpus")
        dims = ABLATION[family].get(devices)
        if dims is None:
            raise NotExpressible(f"the ablation's dims on {devices} devices are not known")
        said = {"global_batch": 8, "n_microbatches": 1, "recompute": "full", "precision": "fp16"}
        row = _with(row, model={**_ABLATION_OF[family], **dims}, parallel={**said, **_ablation_mesh(row, devices)})
    elif family == "moe" and method_name(parallel) == "deepspeed":
        # osdi22_artifact/deepspeed/benchmark_moe.py: on every number of devices 8 sequences at a time of each rank,
        # which are one group.
        row = _with({**row, "model": {**row["model"], "expert_group_size": None}}, parallel={"microbatch": 8})
        row = _with(row, model={"expert_group_size": 8 * number(row["model"], "seq")})
    if method_name(parallel) in ("megatron", "deepspeed"):
        # Run with Megatron's default arguments; Alpa's own models run deterministically.
        row = _with(row, model={"dropout": 0.1})
    if row["model"].get("experts_every_other_layer"):
        # MoEConfig(intermediate_size=hidden_size * 8), and optax_adafactor: benchmark_2d_one_case_moe.py.
        wide = 8 * number(row["model"], "hidden")
        optimizer = {} if method_name(parallel) == "deepspeed" else {"optimizer": "adafactor"}
        convention = {"flops_convention": "alpa_moe_remat"}
        row = _with(row, model={"ffn": wide}, parallel=optimizer, measured=convention)
    return row


def _ablation_mesh(row: Row, devices: int) -> dict[str, int]:
    """Automatic sharding of GPT ran on one logical mesh (data, tensor) after the other, the batch on its first axis:
    the k-th run of a size halves the data ranks k - 1 times."""
    run = re.search(r"#(\d+)$", str(row.get("row")))
    if run is None or method_name(row["parallel"]) != "auto_sharding" or not str(row.get("row")).startswith("gpt"):
        return {}
    tensor = 2 ** (int(run[1]) - 1)
    return {"t": tensor, "d": devices // tensor} if devices % tensor == 0 else {}


def _maxtext(row: Row) -> Row:
    if number(row["cluster"], "slices", 1) > 1:
        raise NotExpressible(
            "several slices: weights are divided within each and whole across them, which no layout is"
        )
    row = _with_recomputation(row)
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
    return _with(row, model={**dims, **more}, parallel=parallel, measured=measured)


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
    return _with(row, parallel=parallel, measured={"flops_convention": "megatron_model"})


def _deepseek(row: Row) -> Row:
    raise NotExpressible("schedule DualPipe: stages fed from both ends, exchanges under computing; no layout has it")


def _engineering(row: Row) -> Row:
    """Its notes say of the table: FLOPs of the model, causal attention, nothing computed again."""
    return _with(row, measured={"flops_convention": "arch_causal"})


SOURCES: Mapping[str, Callable[[Row], Row]] = {
    "alpa osdi": _alpa,
    "maxtext": _maxtext,
    "megatron-core r0.8.0": _megatron_core,
    "deepseek-v3": _deepseek,
    "when-to-upgrade-gpus": _engineering,
}
