"""The chunks of each pipeline rank of a layout, and weights that several stages share.

A weight that several stages use, such as an embedding that is also the head, is stored on each of them with its
gradient and optimizer state, and the gradients are summed over these stages once a step (Shoeybi et al. 2019,
Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.layout import Layout
from autopar.layouts.sections.section import Section, Weight
from autopar.schedule.named import SCHEDULES
from autopar.schedule.schedule import chunks_at

from .memory import data_ranks, gradient_bytes


def chunks_of(rank: int, layout: Layout) -> tuple[int, ...]:
    """The chunks of a pipeline rank."""
    return chunks_at(rank, SCHEDULES[layout.schedule_name].placement(layout.pipeline, layout.interleave))


def once_on_each_rank(chunks: Sequence[Sequence[Section]], layout: Layout) -> list[list[Section]]:
    """The chunks with every shared weight stored once on each rank that uses it: in the section that has most of it. It
    is lent to the others, and ZeRO-3 gathers it for each."""
    result, without = [list(chunk) for chunk in chunks], dict[tuple[int, frozenset[str]], Section]()
    for rank in range(layout.pipeline):
        places = [(c, i) for c in chunks_of(rank, layout) for i in range(len(chunks[c]))]
        owner_of = _largest_places(chunks, places)
        for c, i in places:
            section = chunks[c][i]
            paths = frozenset(weight.path for weight in section.weights if owner_of.get(weight.path, (c, i)) != (c, i))
            if paths:
                # Equal sections stay one object, so that they are priced once.
                own = tuple(weight for weight in section.weights if weight.path not in paths)
                lent = tuple(weight for weight in section.weights if weight.path in paths)
                result[c][i] = without.setdefault((id(section), paths), replace(section, weights=own, lent=lent))
    return result


def _largest_places(
    chunks: Sequence[Sequence[Section]], places: Sequence[tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """The place (chunk and section) among ``places`` where each shared weight is largest; cut sections have a part."""
    sizes: dict[str, tuple[int, tuple[int, int]]] = {}
    for c, i in places:
        for weight in chunks[c][i].shared:
            if weight.elements > sizes.get(weight.path, (-1, (0, 0)))[0]:
                sizes[weight.path] = weight.elements, (c, i)
    return {path: place for path, (_, place) in sizes.items()}


@dataclass(frozen=True)
class Shared:
    """A weight that several pipeline ``ranks`` have; ``weight``: the largest part that one of them has."""

    weight: Weight
    ranks: tuple[int, ...]


def shared_weights(chunks: Sequence[Sequence[Section]], layout: Layout) -> tuple[Shared, ...]:
    """The weights that several ranks have."""
    by_path: dict[str, list[tuple[int, Weight]]] = {}
    for rank in range(layout.pipeline):
        for c in chunks_of(rank, layout):
            for section in chunks[c]:
                for weight in section.shared:
                    by_path.setdefault(weight.path, []).append((rank, weight))
    return tuple(
        Shared(max((weight for _, weight in parts), key=lambda part: part.elements), tuple(rank for rank, _ in parts))
        for parts in by_path.values()
        if len(parts) > 1
    )


def summing_seconds(rank: int, shared: Sequence[Shared], layout: Layout, cluster: Cluster) -> float:
    """Seconds of summing a rank's gradients of shared weights, one after the other. Nothing overlaps them, since the
    first stage has its gradient last."""
    seconds = 0.0
    for weight in shared:
        if rank in weight.ranks:
            count, shards = len(weight.ranks), data_ranks(weight.weight, layout) if layout.zero >= 2 else 1
            # Neighbours of the group are as far from each other as stages among all devices.
            mesh = (count, layout.devices // count)
            nbytes = gradient_bytes(weight.weight, layout) / shards
            seconds += collective_seconds(cluster, mesh, "all_reduce", (0,), nbytes)
    return seconds
