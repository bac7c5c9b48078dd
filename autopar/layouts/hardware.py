"""Whether a cluster has what a layout asks for: devices, a dtype, host memory."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cluster.description import Cluster
from autopar.cost import usable_host_bytes
from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.layouts.step.memory import Held

from .precision import DTYPES


def check_hardware(layout: Layout, cluster: Cluster) -> None:
    """Raises :class:`OptionsError` for what the cluster does not have."""
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
            f"Layout(precision='fp8'): a {device.name} has no products in fp8: its peak_flops are of "
            f"{', '.join(device.peak_flops)}"
        )


def notes_on(layout: Layout, cluster: Cluster) -> tuple[str, ...]:
    """What of a price follows from what the cluster's description leaves out: a rate of products."""
    rates = cluster.device.peak_flops
    if cluster.device.has_rate(DTYPES[layout.precision]):
        return ()
    slowest = min(rates, key=lambda name: rates[name])
    return (
        f"a {cluster.device.name} has no rate of products in {layout.precision}: they are priced as {slowest}, its "
        f"slowest; its rates are of {', '.join(rates)}",
    )


def check_offloaded(held: Iterable[Held], layout: Layout, cluster: Cluster) -> None:
    """Raises :class:`OptionsError` if what is offloaded is more than the host has room for."""
    most, room = max(one.offloaded for one in held), usable_host_bytes(cluster)
    if most > room:
        states = "optimizer states" if layout.offload else ""
        kept = f"what {layout.offload_layers} layers keep" if layout.offload_layers else ""
        works = "divide them by zero=1 and more data ranks, or take more stages" if states else "take fewer of them"
        raise OptionsError(
            f"{layout}: {' and '.join(filter(None, (states, kept)))} of {most} bytes do not fit into a device's share "
            f"of the host's memory, of which {room} bytes may be used; {works}"
        )
