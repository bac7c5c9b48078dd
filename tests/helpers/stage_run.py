"""Runs the chunks of a cut graph one after the other, forward up and backward down, handing over what travels."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Phase, Value
from autopar.ir.staged_graph import Staged
from tests.helpers.interpret import Results, evaluate
from tests.helpers.microbatches import Tensors

Wires = dict[tuple[int, str], torch.Tensor]


def run_chunks(staged: Staged, values: Tensors) -> Results:
    """The results of one microbatch; gradients of a parameter that several chunks have a part of are added."""
    wires: Wires = {}
    known: list[dict[Value, Any]] = [{} for _ in staged.chunks]
    for chunk in range(len(staged.chunks)):
        _run(staged, chunk, "forward", known[chunk], values, wires)
    for chunk in reversed(range(len(staged.chunks))):
        _run(staged, chunk, "backward", known[chunk], values, wires)
    found: Results = {}
    for graph, here in zip(staged.chunks, known, strict=True):
        for output in graph.outputs:
            value = None if output.value is None else here[output.value]
            if output.kind != "send":
                key = (output.kind, output.name)
                before = found.get(key)
                found[key] = value if before is None or value is None or output.kind != "gradient" else before + value
    return found


def _run(staged: Staged, chunk: int, phase: Phase, known: dict[Value, Any], values: Tensors, wires: Wires) -> None:
    graph = staged.chunks[chunk]
    for node in graph:
        if node.op == "receive":
            if node.phase == phase:
                known[Value(node.name)] = wires[chunk, node.target]
        elif phase == (node.phase if not node.is_placeholder else "forward"):
            evaluate(node, graph, known, values)
    sends = {output.name: output.value for output in graph.outputs if output.kind == "send"}
    for edge in staged.edges:
        value = sends.get(edge.name) if edge.source == chunk and edge.phase == phase else None
        if value is not None:
            wires[edge.target, edge.name] = known[value]


def check_staged(staged: Staged, graph: Graph) -> None:
    """Everything crosses by an edge, up in forward and down in backward, and each operation of the graph that is not
    repeated has one place."""
    for index, chunk in enumerate(staged.chunks):
        chunk.verify()
        received = {node.target for node in chunk.placeholders("receive")}
        assert received == {e.name for e in staged.edges if e.target == index}
        sent = {output.name for output in chunk.outputs if output.kind == "send"}
        assert sent == {e.name for e in staged.edges if e.source == index}
        for edge in staged.edges:
            if edge.source == index:
                value = next(o.value for o in chunk.outputs if o.kind == "send" and o.name == edge.name)
                assert value is not None
                assert chunk[value.node].phase == edge.phase
            if edge.target == index:
                assert chunk[edge.name].phase == edge.phase
        _check_phases(chunk)
    held = {node.target for chunk in staged.chunks for node in chunk.placeholders("param")}
    assert held == {node.target for node in graph.placeholders("param")} == set(staged.owners)
    for path, owners in staged.owners.items():
        assert owners == tuple(
            i for i, c in enumerate(staged.chunks) if any(n.target == path for n in c.placeholders("param"))
        )


def _check_phases(chunk: Graph) -> None:
    """Forward needs nothing of backward: the tasks (chunk, phase) have no cycle, given which way edges go."""
    for node in chunk:
        if node.phase == "forward" and not node.is_placeholder:
            assert all(_is_early(chunk[value.node]) for value in node.operands), node


def _is_early(node: Node) -> bool:
    return node.phase == "forward" and node.op != "tangent"
