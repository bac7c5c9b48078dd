"""Finds the best places to cut a graph into pipeline stages, and the bytes that cross them.

A cut between two forward operations is crossed by the values that are computed before it and used after it. Their bytes
rise inside a layer and fall to the residual stream between layers. The candidates are the places where fewer bytes
cross than on either side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

from .chunk_assignment import ChunkLayout
from .data_only import data_only_nodes

# Chosen: hidden values of an MLP are usually four times as wide as what passes between layers.
SHALLOW = 4
COSTLY = frozenset(
    f"aten.{name}"
    for name in ("mm.default", "bmm.default", "addmm.default", "baddbmm.default", "convolution.default", "mv.default")
)
_FLOATING = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128))


@dataclass(frozen=True, slots=True)
class CutCandidate:
    """A cut before the forward operation ``name``: the bytes that cross it forward and (as gradients) backward, for the
    batch of the graph, if it were the only cut."""

    name: str
    forward_bytes: int
    backward_bytes: int


def crossing_bytes(graph: Graph) -> tuple[CutCandidate, ...]:
    """Every place where forward can be cut: before each operation except the first that computes anything."""
    layout = ChunkLayout(graph, ())
    order = [node for node in graph if node.phase == "forward" and node.name in layout.home]
    last = _last_uses(layout, order)
    differentiable = _differentiable(graph)
    changes: dict[int, list[tuple[int, bool]]] = {}
    places = {node.name: index for index, node in enumerate(order)}
    for value, end in last.items():
        size = int(graph.type_of(value).bytes)
        learns = value.node in differentiable and graph.type_of(value).dtype in _FLOATING
        changes.setdefault(places[value.node] + 1, []).append((size, learns))
        changes.setdefault(end + 1, []).append((-size, learns))
    candidates, forward, backward, worked = [], 0, 0, False
    forbidden = _between_reads_and_writes(layout, order)
    for index, node in enumerate(order):
        for size, learns in changes.get(index, ()):
            forward += size
            backward += size if learns else 0
        if node.name not in layout.repeated:
            if worked and index not in forbidden:
                candidates.append(CutCandidate(node.name, forward, backward))
            worked = True
    return tuple(candidates)


def cut_candidates(graph: Graph, least: int = 1) -> tuple[CutCandidate, ...]:
    """The places where fewer bytes cross than around them, in the order of the graph. Of neighbours with no costly
    operation between them only the best is a candidate. Excluded are places where :data:`SHALLOW` times as many bytes
    cross as at the next, and those with nothing costly after them. ``graph`` is concrete, without saved activations.

    If there are fewer than ``least`` (skip connections cross every place between their ends, so that hardly any is
    lower than its neighbours), places where more bytes cross are added, if necessary all.
    """
    forward = [node for node in graph if node.phase == "forward"]
    costly = list(itertools.accumulate((node.op in COSTLY or "dot_product" in node.op) for node in forward))
    segment = dict(zip((node.name for node in forward), costly, strict=True))
    begun = dict(zip((node.name for node in forward), [0, *costly], strict=False))
    everywhere, all_costly = crossing_bytes(graph), max(costly, default=0)
    useful = tuple(c for c in everywhere if begun[c.name] < all_costly) or everywhere
    minima = _best_by_segment(_minima(useful), segment)
    sizes = [_total(candidate) for candidate in minima]
    around = zip([math.inf, *sizes], [*sizes[1:], math.inf], strict=False)
    deep = [c for c, size, pair in zip(minima, sizes, around, strict=True) if size < SHALLOW * min(pair)]
    choices = (deep, minima, _best_by_segment(useful, segment), useful)
    return tuple(next((candidates for candidates in choices if len(candidates) >= least), everywhere))


def _best_by_segment(candidates: Iterable[CutCandidate], segment: Mapping[str, int]) -> list[CutCandidate]:
    """Of neighbours with no costly operation between them, the one that the fewest bytes cross."""
    grouped = itertools.groupby(candidates, lambda candidate: segment[candidate.name])
    return [min(group, key=_total) for _, group in grouped]


def _minima(everywhere: tuple[CutCandidate, ...]) -> list[CutCandidate]:
    """The runs of equal totals that are lower than those on both sides."""
    runs = [list(run) for _, run in itertools.groupby(everywhere, _total)]
    sizes = [math.inf, *(_total(run[0]) for run in runs), math.inf]
    low = (run for index, run in enumerate(runs) if sizes[index] > sizes[index + 1] < sizes[index + 2])
    return [candidate for run in low for candidate in run]


def _total(candidate: CutCandidate) -> int:
    return candidate.forward_bytes + candidate.backward_bytes


def _last_uses(layout: ChunkLayout, order: list[Node]) -> dict[Value, int]:
    """For each value that would be sent, the position of its last use in forward, including uses through repeated
    operations."""
    last_uses: dict[Value, int] = {}
    for index, node in enumerate(order):
        waiting = [] if node.name in layout.repeated else list(node.operands)
        while waiting:
            value = waiting.pop()
            if value.node in layout.repeated:
                waiting += layout.graph[value.node].operands
            elif value.node in layout.home:
                last_uses[value] = index
    return last_uses


def _between_reads_and_writes(layout: ChunkLayout, order: list[Node]) -> set[int]:
    """Places where a cut would separate the operations that read and write a buffer."""
    graph, data = layout.graph, data_only_nodes(layout.graph)
    buffers = {node.target: node.name for node in (*graph.placeholders("buffer"), *graph.placeholders("cache"))}
    forbidden: set[int] = set()
    for output in graph.outputs:
        if output.kind == "mutation" and output.value is not None and output.value.node not in data:
            touching = {output.value.node} | _reading(layout, order, buffers.get(output.name, ""))
            places = [index for index, node in enumerate(order) if node.name in touching]
            forbidden.update(range(min(places) + 1, max(places) + 1) if places else ())
    return forbidden


def _reading(layout: ChunkLayout, order: list[Node], name: str) -> set[str]:
    """Operations that read a placeholder, directly or through repeated ones."""
    carries, readers = {name}, set[str]()
    for node in order:
        if any(value.node in carries for value in node.operands):
            (carries if node.name in layout.repeated else readers).add(node.name)
    return readers


def _differentiable(graph: Graph) -> frozenset[str]:
    """Nodes that depend on parameters, if the graph has a backward."""
    if not graph.gradients:
        return frozenset()
    data = data_only_nodes(graph)
    return frozenset(node.name for node in graph if node.name not in data)


def cuts_for_owners(graph: Graph, owners: Mapping[str, tuple[int, ...]], count: int) -> tuple[str, ...]:
    """Cuts that put every use of a parameter or cache into one of its ``owners`` (chunks, by path), with each operation
    as early as possible. The owners come from another graph of the same model.

    ``graph`` may be a different trace (without dropout, forward only). Raises :class:`OptionsError` if its operations
    are ordered differently, so that no cut fits.
    """
    layout = ChunkLayout(graph, ())
    paths = {node.name: node.target for node in (*graph.placeholders("param"), *graph.placeholders("cache"))}
    order = [node for node in graph if node.phase == "forward" and node.name in layout.home]
    starts: dict[int, int] = {}
    chunk = 0
    for index, node in enumerate(order):
        for path in sorted(_held_of(layout, node, paths)):
            later = [owner for owner in owners.get(path, ()) if owner >= chunk]
            if owners.get(path) and not later:
                raise OptionsError(
                    f"%{node.name} of this graph uses {path!r} in stage {chunk}, but stages {owners[path]} have it"
                )
            if later and min(later) > chunk:
                chunk = min(later)
                starts[chunk] = index
    return _cuts(order, starts, count)


def _held_of(layout: ChunkLayout, node: Node, paths: Mapping[str, str]) -> set[str]:
    """Which of ``paths``, by placeholder, an operation reads, directly or through repeated operations."""
    waiting = [] if node.name in layout.repeated else list(node.operands)
    paths_read: set[str] = set()
    while waiting:
        value = waiting.pop()
        if value.node in paths:
            paths_read.add(paths[value.node])
        elif value.node in layout.repeated:
            waiting += layout.graph[value.node].operands
    return paths_read


def _cuts(order: list[Node], starts: Mapping[int, int], count: int) -> tuple[str, ...]:
    """The names of the operations that begin chunks 1, 2, ...; a chunk without parameters gets the operation before the
    next chunk."""
    positions: list[int] = []
    following = len(order)
    for chunk in range(count - 1, 0, -1):
        following = min(starts.get(chunk, following - 1), following - 1)
        positions.append(following)
    if following < 1:
        raise OptionsError(f"this graph has too few operations for {count} stages")
    return tuple(order[index].name for index in reversed(positions))
