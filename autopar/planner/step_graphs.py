"""The graph of one step, derived from the graph of a model."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, SAVED_ACTIVATION_BEFORE
from autopar.passes.recompute.saved_values import SaveActivations


def bare_step_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """The graph of one training step at a batch size. It computes the loss (without a loss: every output), gradients
    and new buffers."""
    outputs = tuple(o for o in graph.outputs if o.kind != "output" or loss is None or o.name == loss)
    concrete = replace(graph, outputs=outputs).without_dead()
    return concrete.at(**{name: batch for name, _ in graph.symbols})


def pipelined_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """:func:`bare_step_graph` without gradients of inputs: a step in microbatches does not return them."""
    bare = bare_step_graph(graph, loss, batch)
    outputs = tuple(output for output in bare.outputs if output.kind != "input_gradient")
    return replace(bare, outputs=outputs).without_dead()


def step_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """:func:`bare_step_graph` with a node for each saved activation."""
    return SaveActivations()(bare_step_graph(graph, loss, batch))


def graph_hash(graph: Graph) -> str:
    """Identifies a graph by the hash of its text, which names saved activations as plans of format version 7 did."""
    text = graph.to_text().replace(f" = {SAVED_ACTIVATION}(", f" = {SAVED_ACTIVATION_BEFORE}(")
    return hashlib.sha256(text.encode()).hexdigest()[:16]
