"""The optimizer's update of a layout: what it reads and writes, and states that rest in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster.description import Cluster
from autopar.layout import Layout
from autopar.layouts.sections.section import Section, Weight

from .memory import data_ranks, gradient_bytes, resting_states


def updating_seconds(sections: Sequence[tuple[Section, int]], layout: Layout, cluster: Cluster) -> float:
    """Seconds of the optimizer, which reads and writes memory; of so many of each section."""
    moved = sum(often * sum(_updated(weight, layout) for weight in section.trained) for section, often in sections)
    return moved / cluster.device.memory_bandwidth


def _updated(weight: Weight, layout: Layout) -> float:
    """Bytes that the optimizer reads and writes of a weight on one device: states both ways, the weight it writes, and
    reads where the master is its remainder."""
    shards = data_ranks(weight, layout) if layout.zero else 1
    each = 2 * layout.state_itemsize + weight.itemsize * (2 if layout.masters == "remainder" else 1)
    return (gradient_bytes(weight, layout) + weight.elements * each) / shards


def offloading_seconds(sections: Sequence[tuple[Section, int]], layout: Layout, cluster: Cluster) -> float:
    """Seconds in which states come from the host and go back, one weight after the other, hidden by nothing; of so many
    of each section."""
    device = cluster.device
    if not layout.offload:
        return 0.0
    sizes = ((resting_states(weight, layout), often) for section, often in sections for weight in section.trained)
    return sum(2 * often * (device.launch_seconds + nbytes / device.host_bandwidth) for nbytes, often in sizes)
