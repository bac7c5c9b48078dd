"""The graph of one step, derived from the graph of a model."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from autopar.errors import GraphError, OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, SAVED_ACTIVATION_BEFORE
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.planner.steps.step_program import without_input_gradients

from .request import PlanRequest


def bare_step_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """The graph of one training step at a batch size. It computes the loss (without a loss: every output), gradients
    and new buffers."""
    outputs = tuple(o for o in graph.outputs if o.kind != "output" or loss is None or o.name == loss)
    concrete = graph.at(**{name: batch for name, _ in graph.symbols})
    return replace(concrete, outputs=outputs).without_dead()


def pipelined_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """:func:`bare_step_graph` without gradients of inputs: a step in microbatches does not return them."""
    return without_input_gradients(bare_step_graph(graph, loss, batch)).without_dead()


def graph_alone(graph: Graph, loss: str | None, batch: int, count: int) -> Graph:
    """:func:`pipelined_graph` of a batch of the size of one of ``count`` microbatches. Raises :class:`OptionsError`
    where the graph is not known at that size: a symbolic size means 2 or more."""
    if not graph.symbols or batch % count or batch // count < 2:
        only = (
            "holds for this batch size only (its code loops over samples, makes a number of x.shape[0] by int(), or "
            "needs it to equal another size)"
        )
        why = "is known for batches of 2 or more" if graph.symbols else only
        raise OptionsError(
            f'batch_statistics="microbatch", microbatches={count}: the trace of this model {why}, and microbatches of '
            f"{batch / count:g} samples would be batches of their own; use fewer microbatches or a larger batch"
        )
    try:
        return pipelined_graph(graph, loss, batch // count)
    except GraphError as error:
        raise OptionsError(f'batch_statistics="microbatch", microbatches={count}: {error}') from error


def step_graph(graph: Graph, loss: str | None, batch: int) -> Graph:
    """:func:`bare_step_graph` with a node for each saved activation."""
    return SaveActivations()(bare_step_graph(graph, loss, batch))


def step_of(request: PlanRequest) -> Graph:
    """:func:`step_graph` of what is to be planned, made once."""
    whole, loss, batch = request.graph, request.loss, request.batch
    return request.shared.once("step", (whole,), loss, batch, make=lambda: SaveActivations()(_bare_step_of(request)))


def pipelined_step_of(request: PlanRequest) -> Graph:
    """:func:`pipelined_graph` of what is to be planned, at the whole batch, made once."""
    whole, loss, batch = request.graph, request.loss, request.batch
    if not returns_input_gradients(whole):
        return _bare_step_of(request)
    return request.shared.once("pipelined", (whole,), loss, batch, make=lambda: pipelined_graph(whole, loss, batch))


def returns_input_gradients(graph: Graph) -> bool:
    """Whether a step returns gradients of inputs, which one in microbatches does not."""
    return any(output.kind == "input_gradient" for output in graph.outputs)


def _bare_step_of(request: PlanRequest) -> Graph:
    whole, loss, batch = request.graph, request.loss, request.batch
    return request.shared.once("bare step", (whole,), loss, batch, make=lambda: bare_step_graph(whole, loss, batch))


def graph_hash(graph: Graph) -> str:
    """Identifies a graph by the hash of its text, which names saved activations as plans of format version 7 did."""
    text = graph.to_text().replace(f" = {SAVED_ACTIVATION}(", f" = {SAVED_ACTIVATION_BEFORE}(")
    return hashlib.sha256(text.encode()).hexdigest()[:16]
