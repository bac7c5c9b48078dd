"""The price of a message between two pipeline stages."""

from __future__ import annotations

from autopar.cluster.description import Cluster, Link
from autopar.cluster.links import MESSAGE, Rate


def link_between(cluster: Cluster, source: range, target: range) -> Link:
    """The slowest level of links between two blocks of ranks. Each rank sends to the rank at its position in the other
    block; of unequal blocks, to those at its share of the positions."""
    for link in cluster.links:
        if link.size is None or _is_within(link.size, source, target):
            return link
    return cluster.links[-1]


def _is_within(size: int, source: range, target: range) -> bool:
    """Whether every rank is in the same block of ``size`` ranks as the one that it sends to."""
    count = max(len(source), len(target))
    pairs = ((source[i * len(source) // count], target[i * len(target) // count]) for i in range(count))
    return all(a // size == b // size for a, b in pairs)


def _rate(link: Link) -> Rate:
    """The rate of messages; if they were not measured, that of the most similar collective, an all-to-all."""
    rates = link.rates.get(MESSAGE) or link.lines("all_to_all", "direct")
    return min(rates, key=lambda rate: rate.bandwidth)


def message_rate(cluster: Cluster, source: int, target: int, devices: int) -> tuple[float, float]:
    """:func:`rate_between` of the stages ``source`` and ``target``, of so many ``devices`` each."""
    blocks = (range(stage * devices, (stage + 1) * devices) for stage in (source, target))
    return rate_between(cluster, *blocks)


def rate_between(cluster: Cluster, source: range, target: range) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of messages from one rank of the stage on the ranks ``source`` to one of
    the stage on ``target`` while all of both stages send at once. Only these devices share the adapters of a block."""
    link, devices = link_between(cluster, source, target), max(len(source), len(target))
    level = cluster.links.index(link)
    below = (cluster.links[level - 1].size or 1) if level else 1
    slowest = _rate(link)
    share = link.share(below) if link.adapters is None else min(1.0, link.share(min(devices, below)))
    return cluster.collective_seconds + slowest.start + slowest.latency, slowest.bandwidth * share
