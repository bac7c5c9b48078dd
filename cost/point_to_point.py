"""Seconds of a message between two pipeline stages."""

from __future__ import annotations

from autopar.cluster import Cluster, Link

# Messages between two devices are priced as what a collective that is closest to them measures.
_KIND = "all_to_all"


def link_between(cluster: Cluster, source: int, target: int, devices: int) -> Link:
    """The slowest level of links on the way from the block ``source`` of ``devices`` consecutive ranks to the block
    ``target``: each rank sends to the one at its position in the other block."""
    for link in cluster.links:
        if link.size is None:
            return link
        pairs = ((source * devices + i, target * devices + i) for i in range(devices))
        if all(a // link.size == b // link.size for a, b in pairs):
            return link
    return cluster.links[-1]


def message_rate(cluster: Cluster, source: int, target: int, devices: int) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of what one rank of stage ``source`` sends to its counterpart of stage
    ``target``, all ``devices`` of both sending at once."""
    link = link_between(cluster, source, target, devices)
    slowest = min(link.lines(_KIND), key=lambda rate: rate.bandwidth)
    return cluster.collective_seconds + slowest.latency, slowest.bandwidth
