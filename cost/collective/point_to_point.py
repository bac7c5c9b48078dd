"""Seconds of a message between two pipeline stages."""

from __future__ import annotations

from autopar.cluster.description import Cluster, Link
from autopar.cluster.links import MESSAGE, Rate


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


def _rate(link: Link) -> Rate:
    """Where messages were not measured, as what the collective closest to them was: an all-to-all."""
    rates = link.rates.get(MESSAGE) or link.lines("all_to_all", "direct")
    return min(rates, key=lambda rate: rate.bandwidth)


def message_rate(cluster: Cluster, source: int, target: int, devices: int) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of what one rank of stage ``source`` sends to its counterpart of stage
    ``target``, all ``devices`` of both sending at once. Adapters that a block shares are divided among these alone."""
    link = link_between(cluster, source, target, devices)
    level = cluster.links.index(link)
    below = (cluster.links[level - 1].size or 1) if level else 1
    slowest = _rate(link)
    share = link.share(below) if link.adapters is None else min(1.0, link.share(min(devices, below)))
    return cluster.collective_seconds + slowest.start + slowest.latency, slowest.bandwidth * share
