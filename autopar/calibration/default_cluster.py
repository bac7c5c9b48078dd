"""The hardware to price for if the user names none: a calibration made here, otherwise the preset of the GPU's name."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import torch

from autopar.cluster.description import Cluster, Link, local_file
from autopar.cluster.presets import PRESETS
from autopar.errors import OptionsError

from .known_gpus import preset_of
from .machine import measure_gpu

# The names of calibrations of GPUs: of one host, and of several hosts.
CALIBRATIONS = ("local-gpu", "local-job")
# Links that join more devices than this join racks, not hosts.
# Chosen: HGX A100 has 16 GPUs in a host, and racks (NVL72) have more.
LARGEST_HOST = 16
# The link assumed between GPUs if only one GPU was measured: PCIe 4.0, shared.
# Our estimate: a third of the 32 GB/s of x16 each way, since GPUs of a host share it.
UNKNOWN_BANDWIDTH, UNKNOWN_LATENCY = 10e9, 20e-6


def default_cluster(device_type: str, devices: int) -> Cluster:
    """The cluster of ``devices`` devices of this type, as far as this process can see.

    For processors, the calibration ``local``. For GPUs, the first of these: a calibration (``local-gpu``,
    ``local-job``) of this GPU, of at least as many devices and as many in a host; the preset of the GPU's name; the GPU
    measured now, in a few seconds, with assumed links. ``source`` says which. Raises :class:`OptionsError` for other
    device types.
    """
    if device_type == "cpu":
        return Cluster.get("local")
    if device_type != "cuda":
        raise OptionsError(
            f"nothing is known about {device_type!r} devices: describe them by parallelize(..., cluster=...), with a "
            f"preset ({', '.join(sorted(PRESETS))}) or a TOML file like Cluster.get('dgx-a100-80gb').to_toml()"
        )
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(devices)))
    for name in CALIBRATIONS:
        if local_file(name).is_file() and _is_of(measured := Cluster.get(name), gpu.name, per_host, devices):
            return measured
    preset = preset_of(gpu.name, int(gpu.total_memory))
    return _measured_now(gpu.name, per_host) if preset is None else _of_hosts(preset, per_host, devices)


def _is_of(measured: Cluster, gpu: str, per_host: int, devices: int) -> bool:
    """Whether ``measured`` covers this many of these GPUs, with ``per_host`` in each host. Cache folders are often
    shared between hosts with different GPUs."""
    if measured.backend != "nccl" or measured.device.name != gpu or (measured.size or devices) < devices:
        return False
    facts = measured.measurement
    measured_per_host = facts["processes"] / facts["hosts"] if "hosts" in facts else measured.links[0].size or devices
    return per_host == measured_per_host or devices <= min(measured_per_host, per_host)


def _of_hosts(preset: Cluster, per_host: int, devices: int) -> Cluster:
    """``preset`` with as many devices in a node as the launcher started on each host."""
    inner = preset.links[0].size or devices
    smaller = per_host < min(inner, devices) and inner <= LARGEST_HOST and not preset.links[0].torus
    return preset.with_node(per_host) if smaller else preset


def _measured_now(name: str, per_host: int) -> Cluster:
    measured = _measure_once()
    link = Link("unknown", None, UNKNOWN_BANDWIDTH, UNKNOWN_LATENCY)
    source = (
        f"{measured.source}; links between GPUs assumed ({UNKNOWN_BANDWIDTH / 1e9:g} GB/s), since no preset describes "
        f"{name!r}: run `autopar calibrate` to measure them"
    )
    share = measured.device.host_memory_bytes // per_host
    return replace(measured, source=source, links=(link,), device=replace(measured.device, host_memory_bytes=share))


@functools.cache
def _measure_once() -> Cluster:
    # Chosen: short, because planning waits for it.
    return measure_gpu(4.0)
