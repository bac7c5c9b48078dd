"""What one step computes, from the graph of a model."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.passes.recompute.saved_values import SaveActivations


def bare_step_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """What one training step computes: the loss (or, without one, every output), gradients and new buffers; at a batch
    size."""
    kept = tuple(o for o in graph.outputs if o.kind != "output" or loss is None or o.name == loss)
    concrete = replace(graph, outputs=kept).without_dead()
    return concrete.at(**{name: batch for name, _ in graph.symbols})


def pipelined_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """:func:`bare_step_graph` without gradients of inputs: a step in microbatches gives none."""
    found = bare_step_graph(graph, loss, batch)
    outputs = tuple(output for output in found.outputs if output.kind != "input_gradient")
    return replace(found, outputs=outputs).without_dead()


def step_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """:func:`bare_step_graph` with rests for saved values."""
    return SaveActivations()(bare_step_graph(graph, loss, batch))


def graph_hash(graph: Graph) -> str:
    """Identifies a graph by its text."""
    return hashlib.sha256(graph.to_text().encode()).hexdigest()[:16]
