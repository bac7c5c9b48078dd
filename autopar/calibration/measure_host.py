"""How fast a GPU and its host's memory exchange data, every GPU of the host at once."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.cluster.description import machine_memory
from autopar.cluster.device import Device

from .measure_device import mean_seconds

# Chosen: large enough for the full rate of PCIe, small enough to pin for every GPU of a host.
COPIED_BYTES = 64 << 20
# Of a host's memory, what processes, page cache and pinned buffers leave for optimizer states.
# Our estimate.
USABLE = 0.9


def with_host(described: Device, device: torch.device, per_host: int, seconds: float) -> Device:
    """``described`` with the bandwidth at which ``device`` copies from pinned memory of its host, and its share of that
    memory among ``per_host``; called by all processes of the host at once, for about ``seconds``."""
    here = torch.ones(COPIED_BYTES // 4, pin_memory=True)
    there = torch.empty_like(here, device=device)
    taken = mean_seconds(lambda: there.copy_(here, non_blocking=True), device, seconds)[0]
    share = int(USABLE * machine_memory() / per_host)
    return replace(described, host_bandwidth=COPIED_BYTES / taken, host_memory_bytes=share)
