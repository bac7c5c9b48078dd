"""Figures of a cluster file that can only be meant in another unit: 80 bytes of memory, 312 FLOP/s, 5 s of latency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .links import require

if TYPE_CHECKING:
    from .cluster import Cluster

# No hardware has less (of memory, rates), or takes longer (a step of a message, starting an operation).
LEAST_BYTES, LEAST_RATE, LEAST_BANDWIDTH, MOST_SECONDS = 2**20, 1e6, 1e3, 1.0


def check_units(cluster: Cluster, where: str) -> None:
    """Raises :class:`OptionsError` that names the key and its unit; ``where`` is the file."""
    for key, value, least, unit in _amounts(cluster):
        require(value >= least, f"{where}: {key} is {value!r} {unit}; is it meant in other units? Write 80e9 for 80 G")
    for key, value in _seconds(cluster):
        require(value <= MOST_SECONDS, f"{where}: {key} is {value!r} seconds; write 5e-6 for 5 microseconds")


def _amounts(cluster: Cluster) -> Iterator[tuple[str, float, float, str]]:
    device = cluster.device
    yield "device: memory_bytes", device.memory_bytes, LEAST_BYTES, "bytes"
    yield "device: memory_bandwidth", device.memory_bandwidth, LEAST_RATE, "bytes per second"
    for dtype, rate in device.peak_flops.items():
        yield f"device: peak_flops.{dtype}", rate, LEAST_RATE, "FLOP per second"
    for link in cluster.links:
        yield f"link {link.name!r}: bandwidth", link.bandwidth, LEAST_BANDWIDTH, "bytes per second"


def _seconds(cluster: Cluster) -> Iterator[tuple[str, float]]:
    yield "device: launch_seconds", cluster.device.launch_seconds
    yield "device: view_seconds", cluster.device.view_seconds
    for link in cluster.links:
        yield f"link {link.name!r}: latency", link.latency
