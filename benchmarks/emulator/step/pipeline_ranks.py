"""The chunks of each pipeline rank of a layout, and weights that several stages share.

A weight that several stages use, such as an embedding that is also the head, is stored and updated by the first of
them, as in a plan: once a step the others receive it and send their gradients back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache, partial

from autopar.cluster.description import Cluster
from autopar.cost.collective.point_to_point import message_rate
from autopar.layout import Layout
from autopar.schedule.named import SCHEDULES
from autopar.schedule.schedule import held_chunks
from benchmarks.emulator.sections.section import Section

from .memory import LayoutMemory


def chunks_of(rank: int, layout: Layout) -> tuple[int, ...]:
    """The chunks of a pipeline rank."""
    return _held(layout.schedule_name, layout.pipeline, layout.interleave)[rank]


@lru_cache
def _held(schedule: str, stages: int, interleave: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each pipeline rank."""
    return held_chunks(SCHEDULES[schedule].placement(stages, interleave), stages)


def once_on_each_rank(chunks: Sequence[Sequence[Section]], layout: Layout) -> list[list[Section]]:
    """The chunks with every shared weight once on each rank that uses it: in the section that has most of it. It is
    lent to the others, and ZeRO-3 gathers it for each. The first rank that uses it owns it."""
    result = [list(chunk) for chunk in chunks]
    owners = _owners(chunks, layout)
    for rank in range(layout.pipeline):
        places = [(c, i) for c in chunks_of(rank, layout) for i in range(len(chunks[c]))]
        place_of = _largest_places(chunks, places)
        for c, i in places:
            section = chunks[c][i]
            lent = frozenset(weight.path for weight in section.shared if place_of[weight.path] != (c, i))
            borrowed = {weight.path: owners[weight.path] for weight in section.shared if owners[weight.path] != rank}
            if lent or borrowed:
                # Equal sections stay one object, so that they are priced once.
                key = "holding", lent, tuple(borrowed.items())
                result[c][i] = section.once(key, partial(_holding, section, lent, borrowed))
    return result


def _owners(chunks: Sequence[Sequence[Section]], layout: Layout) -> dict[str, int]:
    """The first pipeline rank that uses each shared weight, by path."""
    ranks = SCHEDULES[layout.schedule_name].placement(layout.pipeline, layout.interleave)
    owners: dict[str, int] = {}
    for rank, chunk in zip(ranks, chunks, strict=True):
        for section in chunk:
            for weight in section.shared:
                owners.setdefault(weight.path, rank)
    return owners


def _holding(section: Section, lent: Set[str], borrowed: Mapping[str, int]) -> Section:
    """The section without the weights that it is ``lent``, and with the owners of those that are ``borrowed``."""
    weights = [replace(weight, owner=borrowed.get(weight.path)) for weight in section.weights]
    own = tuple(weight for weight in weights if weight.path not in lent)
    return replace(section, weights=own, lent=tuple(weight for weight in weights if weight.path in lent))


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


def borrowing_seconds(
    rank: int, sections: Sequence[tuple[Section, int]], memory: LayoutMemory, cluster: Cluster
) -> float:
    """Seconds in which a rank receives the weights that it borrows, and sends their gradients back, one after the
    other. Nothing overlaps them. ``sections``: those of the rank, with the number of each."""
    seconds, layout = 0.0, memory.layout
    for section, count in sections:
        for weight in section.weights:
            if weight.owner is not None:
                latency, bandwidth = message_rate(cluster, weight.owner, rank, layout.stage_devices)
                shards = memory.data_ranks(weight) if layout.zero else 1
                once = latency + memory.stored_bytes(weight) / shards / bandwidth
                seconds += count * once * (2 if weight.trained else 1)
    return seconds
