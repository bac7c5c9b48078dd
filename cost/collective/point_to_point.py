"""The price of a message between two pipeline stages."""

from __future__ import annotations

from autopar.cluster.description import Cluster, Link
from autopar.cluster.links import MESSAGE, Rate


def link_between(cluster: Cluster, source: int, target: int, devices: int) -> Link:
    """The slowest level of links between the block ``source`` of ``devices`` consecutive ranks and the block
    ``target``. Each rank sends to the rank at its position in the other block."""
    for link in cluster.links:
        if link.size is None:
            return link
        pairs = ((source * devices + i, target * devices + i) for i in range(devices))
        if all(a // link.size == b // link.size for a, b in pairs):
            return link
    return cluster.links[-1]


def _rate(link: Link) -> Rate:
    """The rate of messages; if they were not measured, that of the most similar collective, an all-to-all."""
    rates = link.rates.get(MESSAGE) or link.lines("all_to_all", "direct")
    return min(rates, key=lambda rate: rate.bandwidth)


def message_rate(cluster: Cluster, source: int, target: int, devices: int) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of messages from one rank of stage ``source`` to its counterpart of stage
    ``target`` while all ``devices`` of both stages send at once. Only these devices share the adapters of a block."""
    link = link_between(cluster, source, target, devices)
    level = cluster.links.index(link)
    below = (cluster.links[level - 1].size or 1) if level else 1
    slowest = _rate(link)
    share = link.share(below) if link.adapters is None else min(1.0, link.share(min(devices, below)))
    return cluster.collective_seconds + slowest.start + slowest.latency, slowest.bandwidth * share
