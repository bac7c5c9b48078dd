"""Which parameters a chunk of a pipeline does not store itself, and what borrowing them costs."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster.description import Cluster
from autopar.cost.collective.point_to_point import rate_between
from autopar.ir.wire_pieces import Layout, busiest_elements
from autopar.placement.placed_step import SharedParameter, SharedParameters, trained
from autopar.search.schedules.chunks import Chunk, meshes_of


def shared_parameters(
    chunks: Sequence[Chunk], placement: tuple[int, ...], cluster: Cluster
) -> tuple[SharedParameters, ...]:
    """For each chunk, the parameters that an earlier chunk stores. A stage borrows each only once, even if several of
    its chunks use it: it receives the stored tensor and sends the gradient back. ``placement``: chunk to pipeline
    rank."""
    owners: dict[str, int] = {}
    stored: dict[str, Layout] = {}
    meshes = meshes_of(chunks, placement)
    present: set[tuple[str, int]] = set()
    shared: list[SharedParameters] = []
    for chunk in chunks:
        borrowed: dict[str, SharedParameter] = {}
        rank, learns = placement[chunk.index], trained(chunk.graph)
        for node in chunk.graph.placeholders("param"):
            path = node.target
            here = Layout(chunk.assignment.parameters[node.name].optimizer, chunk.assignment.mesh)
            stored.setdefault(path, here)
            owner = owners.setdefault(path, rank)
            if (path, rank) in present:
                borrowed[path] = SharedParameter(is_remote=False)
            elif owner != rank:
                latency, bandwidth = rate_between(cluster, meshes.ranks(owner), meshes.ranks(rank))
                moved = busiest_elements(tuple(map(int, node.stored.shape)), stored[path], here)
                seconds = latency + moved * node.stored.dtype.itemsize / bandwidth
                borrowed[path] = SharedParameter(is_remote=True, seconds=seconds * (2 if path in learns else 1))
            present.add((path, rank))
        shared.append(borrowed)
    return tuple(shared)
