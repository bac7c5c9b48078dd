"""Which parameters a chunk of a pipeline does not store itself, and what borrowing them costs."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.collective.point_to_point import message_rate
from autopar.placement.placed_step import SharedParameter, SharedParameters, trained
from autopar.placement.prices import Prices, local_bytes

from .chunks import Chunk


def shared_parameters(
    chunks: Sequence[Chunk], placement: tuple[int, ...], prices: Prices
) -> tuple[SharedParameters, ...]:
    """For each chunk, the parameters that an earlier chunk stores. A stage borrows each only once, even if several of
    its chunks use it: it receives the stored tensor and sends the gradient back. ``placement``: chunk to pipeline
    rank."""
    owners: dict[str, int] = {}
    present: set[tuple[str, int]] = set()
    shared: list[SharedParameters] = []
    for chunk in chunks:
        borrowed: dict[str, SharedParameter] = {}
        rank, learns = placement[chunk.index], trained(chunk.graph)
        for node in chunk.graph.placeholders("param"):
            path = node.target
            owner = owners.setdefault(path, rank)
            if (path, rank) in present:
                borrowed[path] = SharedParameter(is_remote=False)
            elif owner != rank:
                latency, bandwidth = message_rate(prices.cluster, owner, rank, prices.devices)
                stored = chunk.assignment.parameters[node.name].optimizer
                seconds = latency + local_bytes(node.stored, stored, prices.mesh) / bandwidth
                borrowed[path] = SharedParameter(is_remote=True, seconds=seconds * (2 if path in learns else 1))
            present.add((path, rank))
        shared.append(borrowed)
    return tuple(shared)
