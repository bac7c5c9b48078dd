"""What a pass does, as text: one text in, the other out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir.chunk_program import ChunkProgram
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.program import Program, Section

Shown = Graph | Program | Section | ChunkProgram | PipelineProgram
# What a text begins with -> what reads it.
STARTS: dict[str, Callable[[str], Shown]] = {
    "# rank at": Program.from_text,
    "# chunk": ChunkProgram.from_text,
    "# pipeline": PipelineProgram.from_text,
    "graph(": Graph.from_text,
}

# What the bodies of small graphs read.
HEAD = """graph(b=8)
    %x: f32[b, 4] = input("x")
    %w: f32[4, 4] = param("w")
    backward %dy: f32[b, 4] = tangent("0")
    """


def check(step: Callable[[Any], Shown], before: str, after: str) -> None:
    """``step`` turns what the text ``before`` shows into what ``after`` shows.

    Graphs and programs begin as in :data:`STARTS`, a section with its name; the body of a graph that reads the inputs
    of :data:`HEAD` begins with a node.
    """
    assert printed(step(read(before))) == printed(read(after))


def read(text: str) -> Shown:
    """What the text shows."""
    start = text.strip()
    for word, read_text in STARTS.items():
        if start.startswith(word):
            return read_text(text)
    if start.startswith(("%", "backward %", "return")):
        return Graph.from_text(HEAD + text)
    return Section.from_text(text)


def printed(shown: Shown) -> str:
    """Its text with all that the text form has."""
    return shown.to_text(annotated=True) if isinstance(shown, Graph) else shown.to_text()
