"""Measures how fast GPUs and host memory exchange data while all GPUs of the host do so at once."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.cluster.description import machine_memory
from autopar.cluster.device import Device

from .measure_device import mean_seconds

# Chosen: large enough for the full rate of PCIe, small enough to pin for every GPU of a host.
COPIED_BYTES = 64 << 20
# The share of host memory that processes, page cache and pinned buffers leave for optimizer states.
# Our estimate.
USABLE = 0.9


def with_host(described: Device, device: torch.device, per_host: int, seconds: float) -> Device:
    """``described`` with the bandwidth at which ``device`` copies from pinned memory of its host, and its share of host
    memory among ``per_host`` devices. All processes of the host call this at once, for about ``seconds``."""
    on_host = torch.ones(COPIED_BYTES // 4, pin_memory=True)
    on_device = torch.empty_like(on_host, device=device)
    taken = mean_seconds(lambda: on_device.copy_(on_host, non_blocking=True), device, seconds)[0]
    share = int(USABLE * machine_memory() / per_host)
    return replace(described, host_bandwidth=COPIED_BYTES / taken, host_memory_bytes=share)
