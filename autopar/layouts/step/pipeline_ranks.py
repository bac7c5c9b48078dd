"""What each pipeline rank of a layout holds: its chunks, and once every weight that several of their sections use.

A weight that several stages use, such as an embedding that is also the head, rests on each of them with its gradient
and its optimizer state, and the gradients are summed over these stages once a step (Shoeybi et al. 2019, Megatron-LM).
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
    """The chunks with every shared weight once on each rank that uses it: in the section that has most of it. To the
    others it is lent: ZeRO-3 gathers it for each."""
    found, without = [list(chunk) for chunk in chunks], dict[tuple[int, frozenset[str]], Section]()
    for rank in range(layout.pipeline):
        places = [(c, i) for c in chunks_of(rank, layout) for i in range(len(chunks[c]))]
        owner_of = _homes(chunks, places)
        for c, i in places:
            section = chunks[c][i]
            gone = frozenset(weight.path for weight in section.weights if owner_of.get(weight.path, (c, i)) != (c, i))
            if gone:
                # Equal sections stay one object, so that they are priced once.
                left = tuple(weight for weight in section.weights if weight.path not in gone)
                lent = tuple(weight for weight in section.weights if weight.path in gone)
                found[c][i] = without.setdefault((id(section), gone), replace(section, weights=left, lent=lent))
    return found


def _homes(chunks: Sequence[Sequence[Section]], places: Sequence[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Where of ``places`` (chunk and section) each shared weight is largest: a section may be cut."""
    sizes: dict[str, tuple[int, tuple[int, int]]] = {}
    for c, i in places:
        for weight in chunks[c][i].shared:
            if weight.elements > sizes.get(weight.path, (-1, (0, 0)))[0]:
                sizes[weight.path] = weight.elements, (c, i)
    return {path: place for path, (_, place) in sizes.items()}


@dataclass(frozen=True)
class Shared:
    """A weight that several pipeline ranks hold, as that of them does which has most of it."""

    weight: Weight
    ranks: tuple[int, ...]


def shared_weights(chunks: Sequence[Sequence[Section]], layout: Layout) -> tuple[Shared, ...]:
    """The weights that several ranks hold, each rank once."""
    found: dict[str, list[tuple[int, Weight]]] = {}
    for rank in range(layout.pipeline):
        for c in chunks_of(rank, layout):
            for section in chunks[c]:
                for weight in section.shared:
                    found.setdefault(weight.path, []).append((rank, weight))
    return tuple(
        Shared(max((weight for _, weight in held), key=lambda one: one.elements), tuple(rank for rank, _ in held))
        for held in found.values()
        if len(held) > 1
    )


def summing_seconds(rank: int, shared: Sequence[Shared], layout: Layout, cluster: Cluster) -> float:
    """Seconds in which a rank's gradients of shared weights are summed, one after the other; hidden by nothing, since
    the first stage has its gradient last."""
    found = 0.0
    for one in shared:
        if rank in one.ranks:
            count, shards = len(one.ranks), data_ranks(one.weight, layout) if layout.zero >= 2 else 1
            # Neighbours of the group are as far from each other as stages among all devices.
            mesh = (count, layout.devices // count)
            found += collective_seconds(cluster, mesh, "all_reduce", (0,), gradient_bytes(one.weight, layout) / shards)
    return found
