"""Microbatches that are batches of their own: ``Options(batch_statistics="microbatch")``.

Where operations couple the samples of a batch (batch norm in training, contrastive losses, the balance of experts), the
graph of one microbatch cannot be derived from that of the batch. Instead it is the model's own graph at the size of a
microbatch, and a step is what a loop that accumulates gradients computes::

    for inputs in microbatches:              # one after the other
        loss = model(*inputs) / count
        loss.backward()

So statistics are those of the microbatch, the loss is the mean of those of the microbatches, and every microbatch
updates buffers (running statistics) that the one before left. Draws are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Output, Value
from autopar.ops.random import DRAWS

# How the mutations of microbatches become that of the step: each begins with the buffers that the one before left.
LAST = "last"


def own_graph(alone: Graph, count: int) -> Graph:
    """``alone``, concrete at the size of one of ``count`` microbatches, as what each of them computes: its part of the
    mean of the losses and of that mean's gradients. Raises :class:`OptionsError` for a result that has no mean."""
    for output in alone.outputs:
        value = output.value
        if output.kind == "output" and value is not None and not _has_mean(alone, value):
            raise OptionsError(
                f"microbatches={count}: the output {output.name} is {alone.type_of(value)}, and a step with "
                'batch_statistics="microbatch" combines losses only'
            )
    names = {node.name for node in alone}
    suffix = "_of_step"
    while any(f"{name}{suffix}" in names for name in names):
        suffix += "_"
    losses = {o.value: f"{o.value.node}{suffix}" for o in alone.outputs if o.kind == "output" and o.value is not None}
    tangents = {node.name: f"{node.name}{suffix}" for node in alone.placeholders("tangent")}
    nodes = tuple(_with_parts(alone, count, losses, tangents))
    outputs = tuple(_renamed(output, losses) for output in alone.outputs)
    return replace(alone, nodes=nodes, outputs=outputs).verify()


def _has_mean(graph: Graph, value: Value) -> bool:
    kind = graph.type_of(value)
    return kind.rank == 0 and kind.dtype.is_floating_point


def _renamed(output: Output, losses: Mapping[Value, str]) -> Output:
    is_loss = output.kind == "output" and output.value in losses
    return replace(output, value=Value(losses[output.value])) if is_loss and output.value is not None else output


def _with_parts(graph: Graph, count: int, losses: Mapping[Value, str], tangents: Mapping[str, str]) -> Iterator[Node]:
    """The nodes, with a ``count``-th of each loss after it, and of each tangent before backward begins."""

    def part(of: Value, name: str, like: Node) -> Node:
        kind, op = graph.type_of(of), "aten.mul.Tensor"
        return replace(like, name=name, op=op, args=(of, 1.0 / count), kwargs=(), types=(kind,))

    waiting = [node for node in graph if node.name in tangents]
    for node in graph:
        if waiting and not node.is_placeholder and node.phase == "backward":
            yield from (part(Value(tangent.name), tangents[tangent.name], node) for tangent in waiting)
            waiting = []
        named = node.map_values(lambda value: Value(tangents[value.node]) if value.node in tangents else value)
        yield _drawing_pieces(named) if node.op in DRAWS else named
        for loss, name in losses.items():
            if loss.node == node.name:
                yield part(loss, name, replace(node, phase="forward"))


def _drawing_pieces(node: Node) -> Node:
    """The draw of piece k of the whole batch where ``state[3]`` is k (:mod:`autopar.ops.random`)."""
    options = dict(node.kwargs)
    if not options.get("samples"):
        return node
    dim, each = options["samples"]
    size = node.args[1]
    options["samples"] = (dim, each * size[dim])
    return replace(node, kwargs=tuple(options.items()))
