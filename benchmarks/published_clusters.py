"""The clusters of published rows: presets with the devices and networks that rows name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.cluster.description import Cluster
from autopar.cluster.device import Device
from autopar.cluster.links import MESSAGE, Link, Rate

from .published_shape import NotExpressible, number
from .published_systems import SECOND_FLASH, TRITON_FLASH, system

# Bytes/s of the twelve NVLinks of an A100 in one direction.
NVLINKS_A100 = 300e9
# Share of an adapter's nominal rate that collectives reach, as in the presets; seconds of a step of its latency.
SUSTAINED, LATENCY = 0.95, 5e-6
# How quick older kernels of attention are with heads of 128, to those that the device's own figure is of (the second
# FlashAttention on A100, the third and cuDNN's on H100), and whether wide heads are quicker than narrow ones: the first
# is half as quick as the second (Dao 2023, figures 4 to 6), and as quick with heads of 64; its version in Triton is 1.3
# to 2.5 times slower than the second (section 4.1 there); the second reaches on H100 0.6 of the third (Shah et al.
# 2024, figures 5 and 6).
WIDTH = 128
FIRST, TRITON, SECOND_ON_HOPPER, FIRST_ON_HOPPER = 0.5, 0.57, 0.6, 0.8
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


def cluster_of(row: Mapping[str, Any]) -> Cluster:
    """The preset for the row's device, with the network that the row names."""
    cluster = row["cluster"]
    name = next((preset for pattern, preset in PRESETS if re.search(pattern, str(cluster.get("gpu", "")))), None)
    if name is None:
        if cluster.get("gpu") is None:
            raise NotExpressible("cluster.gpu is not given")
        raise NotExpressible(f"no preset for {cluster['gpu']} (cluster.gpu)")
    found = _filled(Cluster.get(name), number(cluster, "n_gpus", 1))
    device = _device(found.device, cluster)
    device = _attending(device, row)
    per_node = int(cluster.get("gpus_per_node") or 8)
    found = replace(found, links=(_inner(found.links[0], str(cluster.get("intra") or "")), *found.links[1:]))
    if BLOCKED[0] in system(row) and number(cluster, "n_gpus", 1) >= BLOCKED[1]:
        device = replace(device, launch_seconds=BLOCKED_LAUNCH)
    for word, link in NETWORKS:
        if word in system(row):
            return replace(found, device=device, links=(found.links[0], link))
    network = str(cluster.get("inter") or "")
    rate = adapter_rate(network, per_node)
    if rate is None or len(found.links) < 2:
        return replace(found, device=device)
    share = OMNI_PATH if "omni-path" in network.lower() else SUSTAINED
    adapters = found.links[-2].size
    if found.links[-1].adapters == 1 and per_node == adapters:
        # All devices of a node share one adapter, which is as quick for one of them alone.
        rate, adapters = rate * per_node, 1
    messages = {MESSAGE: (Rate(LATENCY, rate * SUSTAINED),)}
    outer = Link("network", None, rate * share, LATENCY, messages, adapters=adapters)
    return replace(found, device=device, links=(*found.links[:-1], outer))


def _attending(device: Device, row: Mapping[str, Any]) -> Device:
    """The device with the kernel of attention that a row's system had."""
    words = system(row)
    in_triton = bool(re.search(TRITON_FLASH, words))
    if re.search(r"flash\w*v1", str(row["parallel"].get("attention_kernel"))) or in_triton:
        share = (TRITON if in_triton else FIRST) * (FIRST_ON_HOPPER if device.name.startswith("H") else 1.0)
        quick = device.attention_efficiency * share / (1 + device.attention_width / WIDTH)
        return replace(device, attention_efficiency=quick, attention_width=0.0)
    if device.name.startswith("H") and re.search(SECOND_FLASH, words):
        return replace(device, attention_efficiency=device.attention_efficiency * SECOND_ON_HOPPER)
    return device


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
_DECIMAL = r"(\d+(?:\.\d+)?)"


def adapter_rate(text: str, per_node: int) -> float | None:
    """Bytes/s of the network per device and direction that a description names.

    >>> adapter_rate("8x HDR IB 200 Gb/s per node", 8)
    25000000000.0
    """
    direct = re.search(rf"{_DECIMAL} GB/s per GPU", text)
    if direct:
        return float(direct[1]) * 1e9
    per_gpu = re.search(rf"{_DECIMAL} Gb/s per GPU", text)
    if per_gpu:
        return float(per_gpu[1]) / 8 * 1e9
    several = re.search(rf"(\d+)x\D*{_DECIMAL} Gb/s", text) or re.search(r"(\d+)x(\d+) Gb/s", text)
    if several:
        return int(several[1]) * float(several[2]) / 8 / per_node * 1e9
    whole = re.search(rf"{_DECIMAL} Gb/s(?: \w+)? per node", text)
    return float(whole[1]) / 8 / per_node * 1e9 if whole else None
