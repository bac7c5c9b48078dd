"""Seconds of the optimizer's update under a layout: memory traffic, and transfers of states in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster.description import Cluster
from autopar.cluster.device import Device
from autopar.cost.update import casting_seconds, update_seconds
from autopar.layout import Layout
from autopar.layouts.sections.section import Section, Weight

from .memory import data_ranks, gradient_bytes, resting_states, stored_bytes


def updating_seconds(section: Section, layout: Layout, cluster: Cluster) -> float:
    """Seconds in which the optimizer updates the weights of a section, one after the other."""
    return sum(_updating(weight, layout, cluster.device) for weight in section.trained)


def _updating(weight: Weight, layout: Layout, device: Device) -> float:
    """Seconds of one weight. If a weight is a copy of a master weight, it is written apart; of a remainder and a weight
    the update writes both."""
    if weight.owner is not None:
        return 0.0
    shards = data_ranks(weight, layout) if layout.zero else 1
    elements, value = weight.elements / shards, stored_bytes(weight, layout) / shards
    seconds = update_seconds(device, gradient_bytes(weight, layout) / shards, value, elements * layout.moment_itemsize)
    has_copy = layout.precision != "fp32" and layout.masters == "fp32"
    return seconds + (casting_seconds(device, value, elements * weight.itemsize) if has_copy else 0.0)


def offloading_seconds(sections: Sequence[tuple[Section, int]], layout: Layout, cluster: Cluster) -> float:
    """Seconds of fetching states from the host and returning them, one weight after the other, overlapped by nothing;
    ``sections``: with the number of each."""
    device = cluster.device
    if not layout.offload:
        return 0.0
    sizes = ((resting_states(weight, layout), count) for section, count in sections for weight in section.trained)
    return sum(2 * count * device.host_transfer(nbytes) for nbytes, count in sizes)
