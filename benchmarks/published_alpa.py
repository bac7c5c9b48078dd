"""What Alpa's repository says of its published rows: dims, logical meshes, microbatches, where stages are cut.

Read in github.com/alpa-projects/alpa as of its artifact (January to May 2022), named at each entry; never what was
measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .published_open import method_name
from .published_shape import NotExpressible, filled, number

Row = Mapping[str, Any]
# The ablation of intra-operator parallelism by number of devices (benchmark/alpa/exp_intra_ablation.py): hidden width,
# heads, and experts of every other layer. All have 8 layers, sequences of 1024, one microbatch of 8 of them in all,
# fp16, and layers computed again.
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
# By family, method and number of devices what the scripts of its end-to-end runs give beside batch and model: degrees
# (a logical mesh has data ranks first), how many microbatches there are, how many sequences each has on a data rank.
# One stage (benchmark/alpa/exp_intra_only.py): of GPT the batch lies on the mesh's first axis, of mixtures on either,
# so that their degrees are not said; 70B was run without all-to-alls. What Alpa found for mixtures
# (osdi22_artifact/suite_artifact_e2e_moe.py; rows of GPT say it themselves). Megatron and DeepSpeed: the best of their
# searches (osdi22_artifact/megatron/benchmark_gpt.py, deepspeed/benchmark_moe.py). What these leave out is open.
RUNS: Mapping[tuple[str, str], Mapping[int, dict[str, int]]] = {
    ("gpt", "intra_only"): {
        1: {"p": 1, "d": 1, "t": 1, "microbatch": 16},
        2: {"p": 1, "d": 2, "t": 1, "microbatch": 8, "zero_stage": 2},
        4: {"p": 1, "d": 4, "t": 1, "microbatch": 4, "zero_stage": 2},
        16: {"p": 1, "d": 2, "t": 8, "microbatch": 8, "zero_stage": 2},
        64: {"p": 1, "d": 2, "t": 32, "microbatch": 1, "zero_stage": 2},
    },
    ("moe", "intra_only"): {
        1: {"n_microbatches": 32},
        2: {"n_microbatches": 32},
        4: {"n_microbatches": 16},
        16: {"n_microbatches": 32},
        64: {"ep": 1},
    },
    ("moe", "auto"): {
        1: {"p": 1, "d": 1, "t": 1, "n_microbatches": 512},
        2: {"p": 1, "d": 2, "t": 1, "n_microbatches": 32},
        4: {"p": 2, "d": 2, "t": 1, "n_microbatches": 32},
        16: {"p": 2, "d": 8, "t": 1, "n_microbatches": 16},
    },
    ("gpt", "megatron"): {
        1: {"p": 1, "d": 1, "t": 1, "microbatch": 16},
        4: {"p": 2, "d": 2, "t": 1, "microbatch": 4},
        16: {"p": 8, "d": 1, "t": 2, "microbatch": 4},
    },
    ("moe", "deepspeed"): {
        1: {"p": 1, "d": 1, "t": 1, "ep": 1, "microbatch": 8},
        4: {"p": 1, "d": 4, "t": 1, "ep": 4, "microbatch": 8, "zero_stage": 2},
        16: {"p": 1, "d": 16, "t": 1, "ep": 8, "microbatch": 8, "zero_stage": 2},
    },
}


def completed(row: Row) -> Row:
    """The row with what Alpa's repository says of it. Raises :class:`NotExpressible` for a wide ResNet."""
    family, method = str(row.get("row")).partition(" ")[0], method_name(row["parallel"])
    if family == "wresnet":
        raise NotExpressible("a wide ResNet: no decoder of text")
    devices = number(row["cluster"], "n_gpus")
    if "ablation" in str(row.get("table")) and family in ABLATION:
        row = _of_ablation(row, family, devices)
    elif method == "deepspeed":
        # deepspeed/benchmark_moe.py: on every number of devices 8 sequences at a time of each rank, one group. Masks
        # are made in fp32 (DeepSpeed's moe/sharded_moe.py: "everything is in fp32 in this function").
        group = 8 * number(row["model"], "seq")
        row = {**row, "model": {**row["model"], "expert_group_size": group, "wide_masks": True}}
        row = filled(row, parallel={**RUNS["moe", method].get(devices, {}), "microbatch": 8})
    else:
        row = filled(row, parallel=RUNS.get((family, method), {}).get(devices, {}))
    if method in ("megatron", "deepspeed"):
        # Run with Megatron's default arguments; Alpa's own models run deterministically.
        row = filled(row, model={"dropout": 0.1})
    else:
        row = filled(row, model={"one_hot_embedding": True}, parallel=_cuts(row, method, devices))
    if row["model"].get("experts_every_other_layer"):
        # MoEConfig(intermediate_size=hidden_size * 8), and optax_adafactor: benchmark_2d_one_case_moe.py.
        optimizer = {} if method == "deepspeed" else {"optimizer": "adafactor"}
        convention = {"flops_convention": "alpa_moe_remat"}
        row = filled(row, model={"ffn": 8 * number(row["model"], "hidden")}, parallel=optimizer, measured=convention)
    return row


def _of_ablation(row: Row, family: str, devices: int) -> Row:
    dims = ABLATION[family].get(devices)
    if dims is None:
        raise NotExpressible(f"the ablation's dims on {devices} devices are not known")
    said = {"global_batch": 8, "n_microbatches": 1, "recompute": "full", "precision": "fp16"}
    return filled(row, model={**_ABLATION_OF[family], **dims}, parallel={**said, **_ablation_mesh(row, devices)})


def _ablation_mesh(row: Row, devices: int) -> dict[str, int]:
    """Automatic sharding of GPT ran on one logical mesh (data, tensor) after the other, the batch on its first axis:
    the k-th run of a size halves the data ranks k - 1 times."""
    run = re.search(r"#(\d+)$", str(row.get("row")))
    if run is None or method_name(row["parallel"]) != "auto_sharding" or not str(row.get("row")).startswith("gpt"):
        return {}
    tensor = 2 ** (int(run[1]) - 1)
    return {"t": tensor, "d": devices // tensor} if devices % tensor == 0 else {}


def _cuts(row: Row, method: str, devices: int) -> dict[str, str]:
    """Stages of one device each hold as many layers, the first the embedding besides and the last the head, wherever
    layers divide among them (benchmark_3d_one_case_gpt_bert.py, ``uniform_layer_gpipe``: markers between layers);
    elsewhere, and in what Alpa searches, operations are clustered by their FLOPs (layer_construction.py)."""
    even = method == "inter_only" and number(row["model"], "layers") % devices == 0
    return {"cuts": "layers"} if even else {}
