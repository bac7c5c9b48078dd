"""Published rows as questions: the model's shape, the layout, the cluster; a reason where one cannot be asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import OptionsError
from autopar.layout import Layout

from .published_flops import published_seconds
from .published_models import NotExpressible, Shape

# Sustained share of an adapter's nominal rate: what NCCL's tuning model gives its LL128 protocol.
SUSTAINED = 0.92
# By device, as rows name it: the first pattern that matches.
PRESETS = ((r"A100.*80|80GB \(Ampere\)|A100-SXM", "dgx-a100-80gb"),)


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
        measured = replace(self.shape, flash=True)
        return self.row["source"], measured, self.batch, self.layout.devices, self.cluster


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in path.read_text().splitlines():
        if line.strip():
            yield json.loads(line)


def question_of(row: Mapping[str, Any]) -> Question:
    """Raises :class:`NotExpressible` with the reason why a row cannot be priced."""
    if row.get("kind"):
        raise NotExpressible(f"kind {row['kind']}: no training step")
    parallel, measured = row["parallel"], row["measured"]
    seconds, oom = published_seconds(row), measured.get("oom")
    if seconds is None and not oom:
        raise NotExpressible("neither seconds, tokens nor FLOP/s of a step")
    shape = Shape.of(row["model"], flash=_is_flash(row))
    if not parallel.get("global_batch"):
        raise NotExpressible("no global batch")
    try:
        layout = layout_of(row)
        layout.microbatches(int(parallel["global_batch"]))
    except OptionsError as error:
        raise NotExpressible(str(error)) from error
    return Question(row, shape, layout, int(parallel["global_batch"]), cluster_of(row), seconds, oom)


def _is_flash(row: Mapping[str, Any]) -> bool:
    """Whether attention ran as one kernel: said so, or newer than the kernel's adoption (2023) by device or source."""
    parallel = row["parallel"]
    said = " ".join(str(parallel.get(k, "")) for k in ("attention_kernel", "attention", "recompute"))
    if "flash" in said:
        return True
    if parallel.get("attention_kernel"):
        return False
    years = [int(y) for y in re.findall(r"\b20[12]\d\b", row.get("source", ""))]
    newer = re.search(r"H100|H200|B200|B300|GB200|GB300|TPU|MI3", row["cluster"].get("gpu", ""))
    return bool(newer) or bool(years and max(years) >= 2023)


def layout_of(row: Mapping[str, Any]) -> Layout:
    """The layout of a row; what it leaves out follows from its number of devices. Raises :class:`OptionsError`."""
    parallel = row["parallel"]
    if not parallel.get("t") or not parallel.get("p"):
        raise NotExpressible("tensor and pipeline degrees are not given")
    tensor, pipeline, context = (int(parallel.get(k) or 1) for k in ("t", "p", "cp"))
    devices = row["cluster"].get("n_gpus")
    data = int(parallel.get("d") or 0) or int(devices or 0) // (tensor * pipeline * context)
    if not data:
        raise NotExpressible("the data degree is not given")
    microbatch = parallel.get("microbatch") or parallel.get("per_device_batch") or parallel.get("local_batch")
    if not microbatch:
        raise NotExpressible("no microbatch")
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        microbatch=int(microbatch),
        interleave=int(parallel.get("interleave") or 1),
        recompute=_recompute(str(parallel.get("recompute") or "none")),
        sequence_parallel=bool(parallel.get("sequence_parallel")) and tensor > 1,
        zero=_zero(parallel.get("zero_stage")),
        precision="fp16" if "fp16" in str(parallel.get("precision")) else "bf16",
        eager=_eager(row),
        offload=bool(parallel.get("cpu_offload_optimizer")),
    )


def _recompute(said: str) -> Any:
    return next((kind for kind in ("selective", "full") if said.startswith(kind)), "none")


def _zero(said: object) -> Any:
    if said is None:
        return 0
    found = re.search(r"\d", str(said))
    return int(found[0]) if found else 3 if "FSDP" in str(said) else 0


def _eager(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Norms run eagerly where the row tells apart runs with and without a kernel for them; attention where it says
    that it is torch's own."""
    kernel = str(row["parallel"].get("attention_kernel") or "")
    norms = ("*norm*",) if kernel and "RMS" not in kernel else ()
    return (*norms, *(("*attention*",) if kernel == "torch" else ()))


def cluster_of(row: Mapping[str, Any]) -> Cluster:
    """The preset for the row's device, with the network that the row names."""
    cluster = row["cluster"]
    name = next((preset for pattern, preset in PRESETS if re.search(pattern, cluster.get("gpu", ""))), None)
    if name is None:
        raise NotExpressible(f"no preset for {cluster.get('gpu')}")
    found = Cluster.get(name)
    rate = adapter_rate(str(cluster.get("inter") or ""), int(cluster.get("gpus_per_node") or 8))
    if rate is None or len(found.links) < 2:
        return found
    outer = replace(found.links[-1], bandwidth=rate * SUSTAINED)
    return replace(found, links=(*found.links[:-1], outer))


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
