"""Computation and communication at the same time.

Collectives run on the processors that compute: of a GPU, NCCL's channels take 24 of 108 to 148, HybridEP's 32. So while
a message is sent, computing has done ``1 - taken`` of what it would do alone, and of M seconds of messages beside C of
computing

    hidden = min((1 - taken) M, C)

are not paid in addition. Where messages are not sent meanwhile at all, they take all of the processors.
"""

from __future__ import annotations

from autopar.cluster.description import Cluster

# Share of a GPU's processors that running collectives occupy (HybridEP: 32 of 148).
TAKEN = 0.2


def taken_by_messages(cluster: Cluster) -> float:
    """The share of a device's processors that messages occupy: of chips that are not GPUs, engines of their own send
    them."""
    if not cluster.overlaps:
        return 1.0
    return TAKEN if cluster.device.is_gpu else 0.0


def hidden_seconds(computing: float, communicating: float, taken: float) -> float:
    """Seconds that computation and communication save by running at the same time."""
    return min((1.0 - taken) * communicating, computing)


def at_once(computing: float, communicating: float, taken: float) -> float:
    """Seconds of computation and communication that overlap."""
    return computing + waited(computing, communicating, taken)


def waited(computing: float, communicating: float, taken: float) -> float:
    """Seconds that a collective adds to the computation that it overlaps."""
    return communicating - hidden_seconds(computing, communicating, taken)
