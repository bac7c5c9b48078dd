"""Finds out in which chunk of a cut graph each node is first, without writing the chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopar.ir.graph import Graph
from autopar.ir.node import Value

from .chunk_assignment import ChunkLayout


def first_chunks(graph: Graph, cuts: tuple[str, ...]) -> dict[str, int] | None:
    """For each node that :func:`.cut.cut` writes, with ``cuts`` as there, the first chunk that has it, copies included.
    None if buffers change, or if a chunk repeats what a later one computes: it takes cutting to know those."""
    if any(output.kind == "mutation" for output in graph.outputs):
        return None
    layout = ChunkLayout(graph, cuts)
    chunks: defaultdict[str, set[int]] = defaultdict(set)
    for value, chunk in _returned(layout):
        chunks[value.node].add(chunk)
    for node in reversed(graph.nodes):
        readers = chunks.get(node.name)
        if not readers:
            continue  # Nothing needs it.
        if not node.is_placeholder and node.name not in layout.repeated:
            home = layout.home[node.name]
            if node.phase == "forward" and min(readers) < home:
                return None
            chunks[node.name] = readers = {home}
        if node.name in layout.copies:
            readers = {chunk for chunk in readers if layout.received_for(Value(node.name), chunk) is None}
            chunks[node.name] = readers
        for value in node.operands:
            chunks[value.node] |= readers
    return {node.name: min(chunks[node.name]) for node in graph if chunks.get(node.name)} | {
        node.name: 0 for node in graph.placeholders("param") if not chunks.get(node.name)
    }


def _returned(layout: ChunkLayout) -> Iterator[tuple[Value, int]]:
    """The values that chunks return, each with the chunk that does; of a gradient every part, and its parameter."""
    for output in layout.graph.outputs:
        if output.kind == "gradient":
            parameter = layout.parameters[output.name].name
            for chunk in layout.gradient_chunks[output.name]:
                yield Value(parameter), chunk
            first = min(layout.owners[parameter], default=0)
            yield from ((part, layout.home.get(part.node, first)) for part in layout.parts[output.name])
        elif output.value is not None:
            yield output.value, layout.home.get(output.value.node, 0)
