"""Published rows as questions: the model's shape, the layout, the cluster; a reason where one cannot be asked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster
from autopar.device import Device
from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.links import MESSAGE, Link, Rate

from .published_flops import published_seconds
from .published_shape import NotExpressible, Shape, number

# Bytes/s of the twelve NVLinks of an A100 in one direction.
NVLINKS_A100 = 300e9
# Share of an adapter's nominal rate that collectives reach, as in the presets; seconds of a step of its latency.
SUSTAINED, LATENCY = 0.95, 5e-6
# How quick the first FlashAttention is, to the second: about half (Dao 2023, figures 4 to 6).
FLASH_1 = 0.5
# Networks of systems whose rows do not say how many adapters a node has. Aleph Alpha's messages between stages take as
# long as over four of 200 Gb/s; its collectives take as much longer for every byte of weights as at this rate of each.
NETWORKS = (
    (
        "hagemann",
        Link(
            "infiniband",
            None,
            7.4e9,
            LATENCY,
            {MESSAGE: (Rate(LATENCY, 25e9 * SUSTAINED),)},
            adapters=4,
        ),
    ),
)
# Share of Omni-Path's nominal rate that collectives of NCCL reach, which has no transport of its own for it: one of 32
# GPUs on four nodes reached 10% of it (BigScience's `experiments/bandwidth`), several at once more.
OMNI_PATH = 0.32
# BigScience's runs on at least so many devices hung unless the host waited for each operation before it started the
# next (CUDA_LAUNCH_BLOCKING). Its chronicle compares: on 80 devices that took 3.6 ms more for every layer and
# microbatch, on 160 nothing. We take about half, which is 30 us more for each operation.
BLOCKED, BLOCKED_LAUNCH = ("tr11-176b", 320), 35e-6
# By device, as rows name it: the first pattern that matches.
PRESETS = (
    (r"V100-32", "dgx-v100"),
    (r"V100", "p3.16xlarge"),
    (r"A100-40", "dgx-a100-40gb"),
    (r"A100", "dgx-a100-80gb"),
    (r"H100|H800", "dgx-h100"),
    (r"H200", "dgx-h200"),
    (r"GB300", "gb300-nvl72"),
    (r"GB200", "gb200-nvl72"),
    (r"B300", "dgx-b300"),
    (r"B200", "dgx-b200"),
    (r"MI250", "mi250x"),
    (r"MI300", "mi300x"),
    (r"TPUv?4", "tpu-v4"),
    (r"TPUv?5e", "tpu-v5e"),
    (r"TPUv?5p", "tpu-v5p"),
)


@dataclass(frozen=True)
class Question:
    """One row, ready to be priced."""

    row: Mapping[str, Any]
    shape: Shape
    layout: Layout
    batch: int
    cluster: Cluster
    seconds: float | None
    oom: bool | None

    @property
    def sweep(self) -> tuple[object, ...]:
        """Rows of one sweep measure one model, batch and cluster under several layouts."""
        measured = replace(self.shape, flash=True, upcast=False)
        said = json.dumps([self.row.get("source"), self.row["cluster"]], sort_keys=True)
        return said, measured, self.batch, self.layout.devices


def read_rows(path: Path) -> Iterator[Mapping[str, Any] | NotExpressible]:
    """The rows of a file, and in place of a line that is none the reason."""
    # A file may begin with a byte order mark, and a line may hold characters that ``splitlines`` takes for its end.
    for at, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield NotExpressible(f"line {at} is no JSON: {error}")
                continue
            yield row if isinstance(row, Mapping) else NotExpressible(f"line {at} is no JSON object")


def question_of(row: Mapping[str, Any]) -> Question:
    """Raises :class:`NotExpressible` with the reason why a row cannot be priced."""
    if "lora" in str(row.get("table")).lower():
        raise NotExpressible("LoRA: most weights do not learn")
    if row.get("kind"):
        raise NotExpressible(f"kind {row['kind']}: no training step")
    absent = [part for part in ("model", "cluster", "parallel", "measured") if not isinstance(row.get(part), Mapping)]
    if absent:
        raise NotExpressible(f"the row's {', '.join(absent)} are not given")
    try:
        return _question(row)
    except OptionsError as error:
        raise NotExpressible(str(error)) from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise NotExpressible(f"a field is not what it should be: {type(error).__name__}: {error}") from error


def _question(row: Mapping[str, Any]) -> Question:
    seconds, oom = published_seconds(row), row["measured"].get("oom")
    if seconds is None and not oom:
        raise NotExpressible("neither seconds, tokens nor FLOP/s of a step")
    if seconds is not None and not 0 < seconds < math.inf:
        raise NotExpressible(f"a step of {seconds} seconds")
    # Torch's own attention in training code normalises scores in fp32, operation by operation; fused kernels inside.
    upcast = row["parallel"].get("attention_kernel") == "torch"
    shape = Shape.of(row["model"], flash=_is_flash(row), upcast=upcast)
    if not row["parallel"].get("global_batch"):
        raise NotExpressible("no global batch")
    layout, batch = layout_of(row), number(row["parallel"], "global_batch")
    layout.microbatches(batch)
    return Question(row, shape, layout, batch, cluster_of(row), seconds, oom)


def _is_flash(row: Mapping[str, Any]) -> bool:
    """Whether attention ran as one kernel: said so, or newer than the kernel's adoption (2023) by device or source."""
    parallel = row["parallel"]
    said = " ".join(str(parallel.get(k, "")) for k in ("attention_kernel", "attention", "recompute"))
    if "flash" in said:
        return True
    if parallel.get("attention_kernel"):
        return False
    years = [int(y) for y in re.findall(r"\b20[12]\d\b", str(row.get("source", "")))]
    newer = re.search(r"H100|H200|B200|B300|GB200|GB300|TPU|MI3", str(row["cluster"].get("gpu", "")))
    return bool(newer) or bool(years and max(years) >= 2023)


def layout_of(row: Mapping[str, Any]) -> Layout:
    """The layout of a row; what it leaves out follows from its number of devices. Raises :class:`OptionsError`."""
    parallel = row["parallel"]
    if not parallel.get("t") or not parallel.get("p"):
        raise NotExpressible("tensor and pipeline degrees are not given")
    tensor, pipeline, context = number(parallel, "t"), number(parallel, "p"), number(parallel, "cp", 1)
    devices = number(row["cluster"], "n_gpus", tensor * pipeline * context)
    data = number(parallel, "d", max(1, devices // (tensor * pipeline * context)))
    whole = parallel.get("per_device_batch") or parallel.get("local_batch")
    microbatch = parallel.get("microbatch") or (whole if pipeline == 1 else whole and 1)
    if not microbatch:
        raise NotExpressible("no microbatch")
    said = {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
        "context": context,
        "expert": _expert(parallel, tensor),
        "capacity": float(parallel.get("capacity_factor") or 1.0),
        "microbatch": number({"microbatch": microbatch}, "microbatch"),
        "interleave": number(parallel, "interleave", 1) if pipeline > 1 else 1,
        "recompute": _recompute(str(parallel.get("recompute") or "none")),
        "sequence_parallel": bool(parallel.get("sequence_parallel")) and tensor > 1,
        "zero": _zero(parallel.get("zero_stage"), pipeline),
        "precision": _precision(str(parallel.get("precision"))),
        "overlap": _overlap(row),
        "eager": _eager(row),
        "adding": not re.search(FUSED_GRADIENTS, _system(row)),
        "offload": bool(parallel.get("cpu_offload_optimizer")),
    }
    return Layout(**{**said, **_habits(row)})


def _expert(parallel: Mapping[str, Any], tensor: int) -> int:
    """Ranks among which experts are divided besides tensor ranks: these have experts of their own, or a share of each
    (``etp``)."""
    said = number(parallel, "ep", 1)
    return said if number(parallel, "etp", 1) == tensor or said % tensor else said // tensor


def _precision(said: str) -> Any:
    if "fp8" in said:
        return "fp8"
    if "fp4" in said:
        raise NotExpressible(f"precision {said}")
    return "fp16" if "fp16" in said else "fp32" if said == "fp32" else "bf16"


def _system(row: Mapping[str, Any]) -> str:
    """What is said of who ran it: source, schedule and notes, and the row's own name."""
    words = (row.get("source"), row.get("row"), row["parallel"].get("schedule"), row.get("notes"))
    return " ".join(str(word) for word in words).lower()


# What is known of how a system trains, by words of its source, schedule or notes.
HABITS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llm-foundry", {"eager": ("*",)}),
    # BigScience went over to bf16, whose gradients are added up in fp32, when it also counted the embedding and the
    # head as a layer each; before, gradients were in fp16 as DeepSpeed keeps them (chronicles of tr11-176B).
    ("embedding-balanced", {"lead": 1, "tail": 1}),
    # github.com/Aleph-Alpha/scaling, its library as published in 2024: the embedding, the layers, the last norm and the
    # head are one list that is cut evenly; gradients are kept in bf16 and all-reduced in fp32 whatever ZeRO divides;
    # every tensor rank gathers all logits, and sends all of an activation.
    (
        "hagemann",
        {
            "gradients": "own",
            "whole": ("*loss*",),
            "lead": 1,
            "tail": 2,
            "reduction": "all-fp32",
            "scatter": False,
        },
    ),
)


# Systems known to add gradients up within the products that make them: Megatron since the end of 2021.
FUSED_GRADIENTS = r"korthikanti|megascale|mlperf|nemo|megatron-core|megatron-bridge|llama 3"


def _habits(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, habits in HABITS:
        found.update(habits if word in _system(row) else {})
    if "(deepspeed)" in _system(row) and row["parallel"].get("precision") == "fp16":
        found["gradients"] = "own"
    return found


# Systems whose pipelines send and receive one by one, standing still: DeepSpeed's, and Aleph Alpha's after it.
BLOCKING_MESSAGES = r"deepspeed|hagemann"


# Systems known to send tensor-parallel collectives in pieces beside the products next to them.
PIECEWISE = r"megascale \d+ gpus|megatron-bridge"


def _overlap(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the row, or else what is known of its system, has travel while devices compute. Weights of ZeRO-3 are
    prefetched by all; gradients are reduced under backward where the row says so, and by libraries since 2023. Messages
    between stages hold up only those who wait for them where libraries post sends and receives in pairs."""
    parallel = row["parallel"]
    recent = bool(re.search(r"H100|H800|H200|B200|B300|GB[23]00|TPU", str(row["cluster"].get("gpu", ""))))
    found = ["weight"] if re.search(BLOCKING_MESSAGES, _system(row)) else ["weight", "message"]
    if parallel.get("ddp_overlap", recent):
        found.append("gradient")
    if parallel.get("tp_comm_overlap") or parallel.get("async_tp") or re.search(PIECEWISE, _system(row)):
        found += ["tensor", "gradient"]
    return tuple(dict.fromkeys(found))


def _recompute(said: str) -> Any:
    """Torch's selective checkpoints by operation compute all but every other product again: nearest to everything."""
    if "SAC" in said:
        return "full"
    return next((kind for kind in ("selective", "full") if said.startswith(kind)), "none")


def _zero(said: object, pipeline: int) -> Any:
    """Fully sharded weights stay gathered through a step where stages would gather them for every microbatch."""
    if said is None:
        return 0
    found = re.search(r"\d", str(said))
    return int(found[0]) if found else (3 if pipeline == 1 else 2) if "FSDP" in str(said) else 0


def _eager(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a row names its kernels, all else is torch's own operations, one by one."""
    kernel = str(row["parallel"].get("attention_kernel") or "")
    if not kernel:
        return ("*",) if row["parallel"].get("compile") is False else ()
    norms = () if "RMS" in kernel else ("*norm*",)
    scores = ("*scores",) if kernel == "torch" else ()
    return ("*attention", "*mlp*", "layers.[0-9]", *norms, *scores)


def cluster_of(row: Mapping[str, Any]) -> Cluster:
    """The preset for the row's device, with the network that the row names."""
    cluster = row["cluster"]
    name = next((preset for pattern, preset in PRESETS if re.search(pattern, str(cluster.get("gpu", "")))), None)
    if name is None:
        raise NotExpressible(f"no preset for {cluster.get('gpu')}")
    found = _filled(Cluster.get(name), number(cluster, "n_gpus", 1))
    device = _device(found.device, cluster)
    if re.search(r"flash\w*v1", str(row["parallel"].get("attention_kernel"))):
        device = replace(device, attention_efficiency=device.attention_efficiency * FLASH_1)
    per_node = int(cluster.get("gpus_per_node") or 8)
    found = replace(found, links=(_inner(found.links[0], str(cluster.get("intra") or "")), *found.links[1:]))
    if BLOCKED[0] in _system(row) and number(cluster, "n_gpus", 1) >= BLOCKED[1]:
        device = replace(device, launch_seconds=BLOCKED_LAUNCH)
    for word, link in NETWORKS:
        if word in _system(row):
            return replace(found, device=device, links=(found.links[0], link))
    network = str(cluster.get("inter") or "")
    rate = adapter_rate(network, per_node)
    if rate is None or len(found.links) < 2:
        return replace(found, device=device)
    share = OMNI_PATH if "omni-path" in network.lower() else SUSTAINED
    messages = {MESSAGE: (Rate(LATENCY, rate * SUSTAINED),)}
    outer = Link("network", None, rate * share, LATENCY, messages, adapters=found.links[-2].size)
    return replace(found, device=device, links=(*found.links[:-1], outer))


def _filled(cluster: Cluster, devices: int) -> Cluster:
    """Nodes that are used in equal parts: of the 72 devices of a rack 64, if there are 256 in all."""
    size = cluster.links[0].size or 1
    if devices <= size or devices % size == 0 or cluster.links[0].torus:
        return cluster
    return cluster.with_node(max(part for part in range(1, size + 1) if devices % part == 0))


def _inner(link: Link, text: str) -> Link:
    """The innermost link, with as many NVLinks of 25 GB/s per device as the row says."""
    said = re.search(r"(\d+) inter-gpu connects", text)
    if not said:
        return link
    share = int(said[1]) * 25e9 / NVLINKS_A100
    slower = {
        kind: tuple(replace(rate, bandwidth=rate.bandwidth * share) for rate in rates)
        for kind, rates in link.rates.items()
    }
    return replace(link, bandwidth=link.bandwidth * share, rates=slower)


def _device(device: Device, cluster: Mapping[str, Any]) -> Device:
    """The preset's device, with the memory that the row names: its size and bandwidth."""
    size = re.search(r"(\d+)GB", str(cluster.get("gpu", "")))
    share = device.memory_bandwidth / _NOMINAL.get(device.name.partition("-")[0], device.memory_bandwidth)
    bandwidth = float(cluster["hbm_GBps"]) * 1e9 * share if cluster.get("hbm_GBps") else device.memory_bandwidth
    gigabytes = int(size[1]) if size else 0
    named = int(gigabytes * 2**30 * _VISIBLE) if gigabytes else device.memory_bytes
    differs = abs(named / device.memory_bytes - 1) > 0.1
    return replace(
        device,
        memory_bandwidth=bandwidth,
        memory_bytes=named if differs else device.memory_bytes,
        sustained=device.sustained * _clock(device, cluster.get("power_W")),
    )


def _clock(device: Device, watts: object) -> float:
    """The clock that a limit of power below the chip's own leaves, as a share: power grows as its cube, since voltage
    grows with it."""
    nominal = _WATTS.get(device.name.partition("-")[0])
    if nominal is None or not isinstance(watts, (int, float)) or not 0 < watts < nominal:
        return 1.0
    return float((watts / nominal) ** (1 / 3))


# Nominal memory bandwidth by chip, to scale what is sustained; share of the nominal memory that torch can use.
_NOMINAL = {"H100": 3.35e12}
# Watts that chips take at the most (data sheets of the SXM modules).
_WATTS = {"A100": 400, "H100": 700, "H200": 700}
_VISIBLE = 0.985


def adapter_rate(text: str, per_node: int) -> float | None:
    """Bytes/s of the network per device and direction that a description names.

    >>> adapter_rate("8x HDR IB 200 Gb/s per node", 8)
    25000000000.0
    """
    direct = re.search(r"([\d.]+) GB/s per GPU", text)
    if direct:
        return float(direct[1]) * 1e9
    per_gpu = re.search(r"([\d.]+) Gb/s per GPU", text)
    if per_gpu:
        return float(per_gpu[1]) / 8 * 1e9
    several = re.search(r"(\d+)x\D*([\d.]+) Gb/s", text) or re.search(r"(\d+)x(\d+) Gb/s", text)
    if several:
        return int(several[1]) * float(several[2]) / 8 / per_node * 1e9
    whole = re.search(r"([\d.]+) Gb/s(?: \w+)? per node", text)
    return float(whole[1]) / 8 / per_node * 1e9 if whole else None
