"""Published measurements of collectives and matrix products (``benchmarks/published``), each beside the cluster it is
priced on.

A third of the rows, chosen by a hash of their names, is held out of every fit (:mod:`benchmarks.fit_hardware`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.cluster.description import Cluster
from autopar.ir.node import SHORT_DTYPES
from autopar.ir.program import COLLECTIVES

PUBLISHED = Path(__file__).parent / "published"
# The GPU as the rows name it, and the preset whose device or links it has.
PRESETS = {
    "A100-SXM": "dgx-a100-80gb",
    "A100-80GB": "dgx-a100-80gb",
    "A100-40GB-SXM": "dgx-a100-40gb",
    "H100-SXM": "dgx-h100",
    "H200-SXM": "dgx-h200",
    "B200-SXM": "dgx-b200",
    "GB200-NVL72": "gb200-nvl72",
    "GB300-NVL72": "gb200-nvl72",
    "MI300X": "mi300x",
    "MI250X_GCD": "mi250x",
    "V100-16GB": "dgx-v100",
    "V100-32GB": "dgx-v100",
}
# dtypes of products as the rows of products name them; f32 is computed in TF32 there.
DTYPES = {"bf16xbf16->bf16": "bf16", "f32xf32->f32": "tf32", "f8e4m3fnxf8e4m3fn->bf16": "f8e4m3"}
MESSAGE = "p2p"
# Words of a row for its network: adapters of a node, and gigabits of each.
NETWORKS = (("4x HDR", 4, 200), ("8x HDR", 8, 200), ("4x Omni-Path 100", 4, 100), ("EFA v4", 8, 400))


@dataclass(frozen=True)
class CollectiveRow:
    """``nbytes`` as :mod:`autopar.cost.collective.collective` counts them; ``seconds`` measured. ``cluster`` is None
    where the source does not say which hardware it was."""

    source: str
    gpu: str
    cluster: Cluster | None
    kind: str
    members: int
    nodes: int
    nbytes: float
    seconds: float
    held_out: bool


@dataclass(frozen=True)
class ProductRow:
    """``batch`` products [m, k] @ [k, n] took ``seconds``; ``nbytes`` are those of operands and result."""

    source: str
    gpu: str
    cluster: Cluster
    dtype: str
    batch: int
    matrix: tuple[int, int, int]
    nbytes: int
    seconds: float
    held_out: bool


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with open(path) as lines:
        for line in lines:
            yield json.loads(line)


def is_held_out(name: str) -> bool:
    """A third of all names, the same on every machine."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 3 == 0


def preset_of(gpu: str) -> Cluster | None:
    """The described cluster of that kind of GPU, if there is one."""
    return Cluster.get(PRESETS[gpu]) if gpu in PRESETS else None


def collective_rows(path: Path = PUBLISHED / "collectives.jsonl") -> list[CollectiveRow]:
    """The rows that state a time, or the bytes and a bus bandwidth that give it."""
    return [row for table in _read(path) if (row := _collective_row(table)) is not None]


def _collective_row(table: dict[str, Any]) -> CollectiveRow | None:
    about, measured = table["cluster"], table["measured"]
    kind, members, nodes = measured["op"], int(about["n_gpus"]), int(about["nodes"])
    if not measured.get("bytes") or not measured.get("time_us") or kind not in (*COLLECTIVES, MESSAGE):
        return None
    cluster = preset_of(about["gpu"])
    if cluster is not None and (nodes > 1 or members > (cluster.links[0].size or members)):
        cluster = _with_network(cluster.with_node(int(about["gpus_per_node"])), about.get("inter"), table.get("notes"))
    # nccl-tests counts for an all-to-all what one device holds.
    nbytes = float(measured["bytes"]) * (members if kind == "all_to_all" else 1)
    seconds = float(measured["time_us"]) * 1e-6
    held = is_held_out(table["id"])
    return CollectiveRow(
        source=table["source"],
        gpu=about["gpu"],
        cluster=cluster,
        kind=kind,
        members=members,
        nodes=nodes,
        nbytes=nbytes,
        seconds=seconds,
        held_out=held,
    )


def _with_network(cluster: Cluster, *descriptions: str | None) -> Cluster:
    """The cluster with as many adapters per node, of as many gigabits, as a row's words say."""
    text = " ".join(filter(None, descriptions))
    for words, adapters, gigabits in NETWORKS:
        if words in text:
            network = replace(cluster.links[-1], adapters=adapters, bandwidth=0.95 * gigabits / 8 * 1e9, rates={})
            if words.startswith("EFA"):
                network = Cluster.get("p6-b200.48xlarge").links[-1]
            return replace(cluster, links=(*cluster.links[:-1], network))
    return cluster


def product_rows(path: Path = PUBLISHED / "gemm.jsonl") -> list[ProductRow]:
    """The rows that state a shape and a rate, one for each dtype."""
    return [row for table in _read(path) for row in _product_rows(table)]


def _product_rows(table: dict[str, Any]) -> Iterator[ProductRow]:
    measured, gpu = table["measured"], table["cluster"]["gpu"].rstrip("?")
    cluster = preset_of(gpu)
    shape = [int(measured[d]) for d in "mnk"] if "m" in measured else _shape(measured.get("shape", ""))
    if cluster is None or not shape:
        return
    m, n, k = shape
    for name, rate in measured["tflops"].items():
        dtype = DTYPES.get(name, name)
        if dtype in ("bf16", "tf32", "f8e4m3") and isinstance(rate, float) and rate > 0:
            batch = int(measured.get("b", 1))
            seconds = 2.0 * batch * m * n * k / (rate * 1e12)
            size = 4 if dtype == "tf32" else SHORT_DTYPES[dtype].itemsize
            nbytes = batch * (size * (m * k + k * n) + max(size, 2) * m * n)
            held = is_held_out(f"{table['id']} {dtype}")
            yield ProductRow(
                source=table["source"],
                gpu=gpu,
                cluster=cluster,
                dtype=dtype,
                batch=batch,
                matrix=(m, n, k),
                nbytes=nbytes,
                seconds=seconds,
                held_out=held,
            )


def _shape(text: str) -> list[int]:
    return [int(part) for part in text.split("x")] if text.count("x") == 2 else []


def dtype_of(cluster: Cluster, name: str) -> tuple[Cluster, torch.dtype]:
    """The torch dtype of a row's, and the cluster to price it on: TF32 is what f32 products run in if they may."""
    if name != "tf32":
        return cluster, SHORT_DTYPES[name]
    device = cluster.device
    peaks = {**device.peak_flops, "f32": device.peak_flops["tf32"]}
    factors = dict(device.dtype_efficiency)
    if "tf32" in factors:
        factors["f32"] = factors["tf32"]
    return replace(cluster, device=replace(device, peak_flops=peaks, dtype_efficiency=factors)), torch.float32


def unusable_rows(collectives: Path, products: Path) -> dict[str, int]:
    """How many rows of the files say too little to be priced, by reason."""
    silent = sum(_collective_row(table) is None for table in _read(collectives))
    shapeless = sum(not any(_product_rows(table)) for table in _read(products))
    return {"collective without bytes or time": silent, "product without shape, rate or described hardware": shapeless}
