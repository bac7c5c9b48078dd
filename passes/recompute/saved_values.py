"""Inserts a saved activation (``autopar.saved``) for every value that forward computes and backward reads.

A value saved for backward has consumers in both phases. Without the insertion, a forward result that is a partial sum
would be reduced once in forward and again in backward. ``autopar.saved`` is an identity between producer and consumers:
the producer's result is resharded once to the placement in which it is saved until backward, and every consumer reads
it from there.

    %y: f32[4, 4] = aten.mm.default(%x, %w)                 %y: f32[4, 4] = aten.mm.default(%x, %w)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %y)   ->   %y_rest: f32[4, 4] = autopar.saved(%y)
                                                            backward %g: f32[4, 4] = aten.mul.Tensor(%d, %y_rest)

Values that exist for the whole step (parameters, buffers, inputs, constants) are not saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.passes.base import Pass


@dataclass(frozen=True)
class SaveActivations(Pass):
    """Inserts ``autopar.saved`` after each saved value; see the module docstring."""

    name: ClassVar[str] = "save-activations"

    def apply(self, graph: Graph) -> Graph:
        return save_activations(graph)


def saved_values(graph: Graph) -> list[Value]:
    """Forward results with a use in backward, in order of definition, without placeholders."""
    read = {value for node in graph.nodes if node.phase == "backward" for value in node.operands}
    names = {value.node for value in read}
    return [
        Value(node.name, index)
        for node in graph.nodes
        if node.name in names and node.phase == "forward" and not node.is_placeholder
        for index in range(len(node.types))
        if Value(node.name, index) in read
    ]


def save_activations(graph: Graph) -> Graph:
    """The graph with one ``autopar.saved`` per saved value, which takes over all its uses by operations."""
    saved = {
        value: Value(_rest_name(value)) for value in saved_values(graph) if graph[value.node].op != SAVED_ACTIVATION
    }
    nodes: list[Node] = []
    names = {value.node for value in saved}
    for node in graph.nodes:
        if not saved.keys().isdisjoint(node.operands):
            node = node.map_values(lambda value: saved.get(value, value))
        nodes.append(node)
        if node.name not in names:
            continue
        for index, kind in enumerate(node.types):
            value = Value(node.name, index)
            if value in saved and kind is not None:
                nodes.append(
                    Node(
                        name=saved[value].node,
                        op=SAVED_ACTIVATION,
                        args=(value,),
                        kwargs=(),
                        types=(kind,),
                        module=node.module,
                        source=node.source,
                    )
                )
    return replace(graph, nodes=tuple(nodes))


def _rest_name(value: Value) -> str:
    return f"{value.node}_rest" if value.index == 0 else f"{value.node}_result{value.index}_rest"
