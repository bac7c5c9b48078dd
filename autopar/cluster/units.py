"""Finds figures of a cluster file that must be in a wrong unit: 80 bytes of memory, 312 FLOP/s, 5 s of latency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .device import Device
from .groups import Group
from .links import Link, require

# No hardware has less (of memory, rates), or takes longer (a step of a message, starting an operation).
# Chosen: orders of magnitude from any device, to catch a mistaken unit.
LEAST_BYTES, LEAST_RATE, LEAST_BANDWIDTH, MOST_SECONDS = 2**20, 1e6, 1e3, 1.0
_RATES = ("memory_bandwidth", "update_bandwidth", "host_bandwidth", "nvme_read_bandwidth", "nvme_write_bandwidth")
_OF_DEVICE = ("launch_seconds", "view_seconds", "host_seconds", "function_seconds")
_OF_CLUSTER = ("collective_seconds", "synchronisation_seconds")
_OF_RATE = ("latency", "start", "ramp")


class Described(Protocol):
    """The parts of a :class:`~autopar.cluster.description.Cluster` that are checked."""

    @property
    def device(self) -> Device: ...
    @property
    def links(self) -> tuple[Link, ...]: ...
    @property
    def groups(self) -> tuple[Group, ...]: ...


def check_units(cluster: Described, where: str) -> None:
    """Raises :class:`OptionsError` that names the key and its unit. ``where`` is the file. A figure of 0 means that it
    is not given."""
    for key, value, least, unit in _amounts(cluster):
        message = f"{where}: {key} is {value!r} {unit}; is it meant in other units? Write 80e9 for 80 G"
        require(value == 0 or value >= least, message)
    for key, value in _seconds(cluster):
        require(value <= MOST_SECONDS, f"{where}: {key} is {value!r} seconds; write 5e-6 for 5 microseconds")
    for key, device in _devices(cluster):
        require(
            device.reserve_bytes < device.memory_bytes,
            f"{where}: {key}: reserve_bytes is {device.reserve_bytes} of {device.memory_bytes} bytes of memory, which "
            "leaves nothing",
        )


def _devices(cluster: Described) -> Iterator[tuple[str, Device]]:
    """The devices that a file gives, with their keys."""
    if not cluster.groups:
        yield "device", cluster.device
    for index, group in enumerate(cluster.groups):
        yield f"groups[{index}].device", group.device


def _amounts(cluster: Described) -> Iterator[tuple[str, float, float, str]]:
    for key, device in _devices(cluster):
        for name in ("memory_bytes", "host_memory_bytes"):
            yield f"{key}: {name}", getattr(device, name), LEAST_BYTES, "bytes"
        for name in _RATES:
            yield f"{key}: {name}", getattr(device, name), LEAST_RATE, "bytes per second"
        for dtype, rate in device.peak_flops.items():
            yield f"{key}: peak_flops.{dtype}", rate, LEAST_RATE, "FLOP per second"
    for link in cluster.links:
        if link.size == 1:
            continue  # It joins nothing: a single device's (autopar/calibration/machine.py).
        for name in ("bandwidth", "pair_bandwidth"):
            yield f"link {link.name!r}: {name}", getattr(link, name), LEAST_BANDWIDTH, "bytes per second"
        for kind, lines in link.rates.items():
            for line in lines:
                key = f"link {link.name!r}: rates.{kind}: bandwidth"
                yield key, line.bandwidth, LEAST_BANDWIDTH, "bytes per second"


def _seconds(cluster: Described) -> Iterator[tuple[str, float]]:
    for name in _OF_CLUSTER:
        yield name, getattr(cluster, name)
    for key, device in _devices(cluster):
        for name in _OF_DEVICE:
            yield f"{key}: {name}", getattr(device, name)
    for link in cluster.links:
        yield f"link {link.name!r}: latency", link.latency
        for kind, lines in link.rates.items():
            for line in lines:
                for name in _OF_RATE:
                    yield f"link {link.name!r}: rates.{kind}: {name}", getattr(line, name)
