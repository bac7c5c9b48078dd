"""The optimizer's update of a layout: what it reads and writes, and states that rest in host memory."""

from __future__ import annotations

from collections.abc import Iterable

from .cluster import Cluster
from .layout import Layout
from .layout_memory import data_ranks, gradient_bytes, resting_states, state_bytes
from .layout_section import Weight


def updating_seconds(weights: Iterable[Weight], layout: Layout, cluster: Cluster) -> float:
    """Seconds of the optimizer, which reads and writes memory."""
    return sum(_updated(weight, layout) for weight in weights) / cluster.device.memory_bandwidth


def _updated(weight: Weight, layout: Layout) -> float:
    """Bytes that the optimizer reads and writes of a weight on one device."""
    shards = data_ranks(weight, layout) if layout.zero else 1
    each = 2 * state_bytes(layout) + weight.itemsize
    return (gradient_bytes(weight, layout) + weight.elements * each) / shards


def offloading_seconds(weights: Iterable[Weight], layout: Layout, cluster: Cluster) -> float:
    """Seconds in which states come from the host and go back, one weight after the other, hidden by nothing."""
    device = cluster.device
    if not layout.offload:
        return 0.0
    sizes = (resting_states(weight, layout) for weight in weights)
    return sum(2 * (device.launch_seconds + nbytes / device.host_bandwidth) for nbytes in sizes)
