"""Bytes of a device that a plan may use, and bytes that must stay free."""

from __future__ import annotations

import math

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError


def reserve(cluster: Cluster) -> int:
    """Bytes of a device's memory that a plan leaves free, for contexts and buffers of libraries, and fragmentation."""
    device = cluster.device
    return device.reserve_bytes + math.ceil(device.reserve_fraction * device.memory_bytes)


# The share of host memory, and of a disk, that data loading, checkpoints and the system leave.
# Our estimate (docs/cost-model.md, "Host memory").
HOST_SHARE = 0.8


def usable_host_bytes(cluster: Cluster) -> int:
    """Bytes of host memory that a plan may use for each device; 0 if there is none apart from the device's."""
    return int(HOST_SHARE * cluster.device.host_memory_bytes)


def usable_nvme_bytes(cluster: Cluster) -> int:
    """Bytes of the local disk that a plan may use for each device; 0 if there is none."""
    return int(HOST_SHARE * cluster.device.nvme_bytes)


def usable_bytes(cluster: Cluster) -> int:
    """Bytes of a device's memory that a plan may use. Raises :class:`OptionsError` if the reserve leaves none."""
    left = cluster.device.memory_bytes - reserve(cluster)
    if left <= 0:
        raise OptionsError(
            f"cluster {cluster.name!r} reserves {reserve(cluster)} of {cluster.device.memory_bytes} bytes; "
            "lower its reserve_bytes"
        )
    return left
