"""Pipeline stages: a graph cut into chunks, and what is sent between them.

A *chunk* is a contiguous part of the model's forward, with the backward that belongs to it; a pipeline rank (one of the
``stages`` groups of devices) holds one chunk or several. Chunks are numbered in the order of forward, 0 first.

A chunk is a :class:`~autopar.ir.graph.Graph` of its own. Values made in another chunk enter it as ``receive``
placeholders, named and targeted as the value in the chunk that makes it; values other chunks need leave it as ``send``
outputs of that name. Forward values are sent to a higher chunk, backward values to a lower one, always directly from
the chunk that makes them to each that needs them::

    %add_12: f32[4, 64] = receive("add_12")  @h.1
    ...
    return gradient "h.1.weight" = %mm_7
    return send "add_25" = %add_25
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import Graph
from .node import Phase


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """The value ``name`` is sent from chunk ``source`` to chunk ``target``, once for each microbatch."""

    source: int
    target: int
    name: str

    @property
    def phase(self) -> Phase:
        return "forward" if self.source < self.target else "backward"


@dataclass(frozen=True)
class Staged:
    """A graph of one microbatch, cut.

    ``owners`` gives, for each parameter, the chunks that use it, starting with the one that holds it: the others are
    sent its value once a step, and send back their part of the gradient, which is added. ``prelude`` computes, once a
    step and on the whole batch, what a microbatch must know of the others (such as the number of tokens that count);
    its output ``name`` is the placeholder ``input(name)`` of the chunks. ``own_statistics``: whether every microbatch
    is a batch of its own, which reads buffers as the one before left them.
    """

    chunks: tuple[Graph, ...]
    edges: tuple[Edge, ...]
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prelude: Graph | None = None
    own_statistics: bool = False

    def holders(self) -> dict[str, tuple[int, ...]]:
        """For each parameter and each cache, by name, the chunks that use it: where it rests."""
        caches: dict[str, tuple[int, ...]] = {}
        for index, chunk in enumerate(self.chunks):
            for node in chunk.placeholders("cache"):
                caches[node.target] = (*caches.get(node.target, ()), index)
        return {**self.owners, **caches}

    def links(self) -> tuple[tuple[int, int], ...]:
        """The pairs of chunks between which forward values are sent."""
        return tuple(dict.fromkeys((e.source, e.target) for e in sorted(self.edges) if e.phase == "forward"))

    def values(self, source: int, target: int) -> tuple[str, ...]:
        """What is sent from one chunk to another for one microbatch, in the order of the message."""
        return tuple(e.name for e in sorted(self.edges) if (e.source, e.target) == (source, target))
