"""Checks that a cluster has what a layout needs: devices, a dtype, host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.cluster.description import Cluster
from autopar.cost import usable_host_bytes
from autopar.errors import OptionsError
from autopar.layout import Layout
from benchmarks.emulator.step.memory import Held


def check_hardware(layout: Layout, cluster: Cluster) -> None:
    """Raises :class:`OptionsError` if the cluster lacks devices or host memory."""
    if cluster.size is not None and layout.devices > cluster.size:
        raise OptionsError(f"{layout} takes {layout.devices} devices; {cluster.name} has {cluster.size}")
    if layout.offload:
        check_host(layout, cluster, "offload")


def check_host(layout: Layout, cluster: Cluster, field: str) -> None:
    """Raises :class:`OptionsError` if devices have no host memory, for which ``field`` asks."""
    if not cluster.device.has_host:
        raise OptionsError(
            f"{layout}: a {cluster.device.name} of {cluster.name} has no host memory to offload to; describe it by "
            f"host_bandwidth and host_memory_bytes in the cluster's file, or leave {field} out"
        )


def notes_on(layout: Layout, dtype: torch.dtype, cluster: Cluster) -> tuple[str, ...]:
    """Which parts of a price are assumed because the cluster's description omits the rate of products in ``dtype``."""
    rates = cluster.device.peak_flops
    if cluster.device.has_rate(dtype):
        return ()
    slowest = min(rates, key=lambda name: rates[name])
    return (
        f"a {cluster.device.name} has no rate of products in {layout.precision}: they are priced as {slowest}, its "
        f"slowest; its rates are of {', '.join(rates)}",
    )


def check_offloaded(held: Iterable[Held], layout: Layout, cluster: Cluster) -> None:
    """Raises :class:`OptionsError` if the host has no room for the offloaded bytes."""
    most, room = max(rank.offloaded for rank in held), usable_host_bytes(cluster)
    if most > room:
        raise OptionsError(
            f"{layout}: what rests on the host, {most} bytes, does not fit into a device's share of the host's memory, "
            f"of which {room} bytes may be used; divide optimizer states by zero=1 and more data ranks, take more "
            "stages, or offload less"
        )
