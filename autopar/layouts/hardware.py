"""Checks that a cluster has what a layout needs: devices, a dtype, host memory."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cluster.description import Cluster
from autopar.cost import usable_host_bytes
from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.layouts.step.memory import Held

from .precision import DTYPES


def check_hardware(layout: Layout, cluster: Cluster) -> None:
    """Raises :class:`OptionsError` if the cluster lacks devices, host memory or fp8 products."""
    if cluster.size is not None and layout.devices > cluster.size:
        raise OptionsError(f"{layout} takes {layout.devices} devices; {cluster.name} has {cluster.size}")
    device = cluster.device
    if (layout.offload or layout.offload_layers) and not device.has_host:
        field = "offload" if layout.offload else "offload_layers"
        raise OptionsError(
            f"{layout}: a {device.name} of {cluster.name} has no host memory to offload to; describe it by "
            f"host_bandwidth and host_memory_bytes in the cluster's file, or leave {field} out"
        )
    if layout.precision == "fp8" and not device.has_rate(DTYPES["fp8"]):
        raise OptionsError(
            f"Layout(precision='fp8'): a {device.name} has no fp8 products: its peak_flops are of "
            f"{', '.join(device.peak_flops)}"
        )


def notes_on(layout: Layout, cluster: Cluster) -> tuple[str, ...]:
    """Which parts of a price are assumed because the cluster's description omits a rate of products."""
    rates = cluster.device.peak_flops
    if cluster.device.has_rate(DTYPES[layout.precision]):
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
        states = "optimizer states" if layout.offload else ""
        activations = f"the saved activations of {layout.offload_layers} layers" if layout.offload_layers else ""
        works = "divide them by zero=1 and more data ranks, or take more stages" if states else "take fewer of them"
        raise OptionsError(
            f"{layout}: {' and '.join(filter(None, (states, activations)))} of {most} bytes do not fit into a device's "
            f"share of the host's memory, of which {room} bytes may be used; {works}"
        )
