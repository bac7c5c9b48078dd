"""Seconds of the optimizer's update under a layout: memory traffic, and transfers of states in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster.description import Cluster
from autopar.layout import Layout
from autopar.layouts.sections.section import Section, Weight

from .memory import data_ranks, gradient_bytes, resting_states


def updating_seconds(sections: Sequence[tuple[Section, int]], layout: Layout, cluster: Cluster) -> float:
    """Seconds in which the optimizer reads and writes memory; ``sections``: with the number of each."""
    moved = sum(count * sum(_updated(weight, layout) for weight in section.trained) for section, count in sections)
    return moved / cluster.device.memory_bandwidth


def _updated(weight: Weight, layout: Layout) -> float:
    """Bytes that the optimizer reads and writes of a weight on one device: it reads and writes states, reads gradients,
    writes the weight, and reads it if the master weight is stored as a remainder."""
    shards = data_ranks(weight, layout) if layout.zero else 1
    each = 2 * layout.state_itemsize + weight.itemsize * (2 if layout.masters == "remainder" else 1)
    return (gradient_bytes(weight, layout) + weight.elements * each) / shards


def offloading_seconds(sections: Sequence[tuple[Section, int]], layout: Layout, cluster: Cluster) -> float:
    """Seconds of fetching states from the host and returning them, one weight after the other, overlapped by nothing;
    ``sections``: with the number of each."""
    device = cluster.device
    if not layout.offload:
        return 0.0
    sizes = ((resting_states(weight, layout), count) for section, count in sections for weight in section.trained)
    return sum(2 * count * (device.launch_seconds + nbytes / device.host_bandwidth) for nbytes, count in sizes)
