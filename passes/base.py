"""Base class of passes: frozen dataclasses whose fields are their options, from valid graph to valid graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, reduce
from typing import ClassVar

import torch

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Output, Phase, Value
from autopar.torch_internals.operators import is_mutable, operation_called

# Operations whose results depend on strides, which a graph does not show and dropping a copy may change.
LAYOUT_SENSITIVE = frozenset(("aten.as_strided.default", "aten.view.dtype", "aten.as_strided_scatter.default"))


class Pass(ABC):
    """Transforms a graph into a graph. Subclasses are frozen dataclasses with a kebab-case ``name`` and an ``apply``;
    calling one also verifies both graphs.

    >>> from autopar.passes.normalise.eliminate_dead import RemoveDead
    >>> RemoveDead().name
    'remove-dead'
    """

    name: ClassVar[str]

    @abstractmethod
    def apply(self, graph: Graph) -> Graph:
        """Returns the new graph; ``graph`` is immutable."""

    def __call__(self, graph: Graph) -> Graph:
        """Calls ``apply``, and verifies the graph before and after. Raises :class:`GraphError` with the printed
        graph."""
        self._verified(graph, "before")
        return self._verified(self.apply(graph), "after")

    def _verified(self, graph: Graph, when: str) -> Graph:
        try:
            return graph.verify()
        except GraphError as error:
            raise GraphError(f"{when} pass {self.name}: {error}\n{graph.to_text()}") from error


def run(passes: Iterable[Pass], graph: Graph) -> Graph:
    """Applies all ``passes`` in order. The graph is verified before the first and after the last; if either fails, the
    passes are called one by one, so that the error names the one to blame."""
    steps = tuple(passes)
    try:
        graph.verify()
        return reduce(lambda result, step: step.apply(result), steps, graph).verify()
    except Exception:  # Given an invalid graph, a pass may raise anything.
        return reduce(lambda result, step: step(result), steps, graph)


def rewrite(graph: Graph, visit: Callable[[Node], Node | Value]) -> Graph:
    """Replaces each node by what ``visit`` returns for it: a node of the same name, or an earlier value that replaces
    its (first) result.

    ``visit`` sees nodes in order, with operands already replaced; placeholders are left alone.
    """
    renamed: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if renamed and not renamed.keys().isdisjoint(node.operands):
            node = node.map_values(lambda value: renamed.get(value, value))
        replacement = node if node.is_placeholder else visit(node)
        if isinstance(replacement, Value):
            renamed.update(
                (Value(node.name, i), Value(replacement.node, replacement.index + i)) for i in range(len(node.types))
            )
        else:
            nodes.append(replacement)
    outputs = tuple(_renamed(output, renamed) for output in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _renamed(output: Output, renamed: dict[Value, Value]) -> Output:
    if output.value is None or output.value not in renamed:
        return output
    return replace(output, value=renamed[output.value])


@cache
def is_pure(op: str) -> bool:
    """Whether an operation gives equal results for equal operands and has no side effects: operations of ATen or
    autopar that neither write nor draw from a generator. Unknown operations count as impure."""
    operation = operation_called(op) if op.startswith(("aten.", "autopar.")) else None
    if operation is None:
        return False
    return not is_mutable(operation) and torch.Tag.nondeterministic_seeded not in operation.tags


def with_phases(graph: Graph) -> Graph:
    """Sets phases by their definition: nodes that an output or a mutation needs are forward, nodes that only gradients
    need are backward."""
    results = (o.value for o in graph.outputs if o.kind in ("output", "mutation"))
    needed = graph.needed_for(value for value in results if value is not None)

    def phased(node: Node) -> Node:
        phase: Phase = "forward" if node.name in needed else "backward"
        return node if node.is_placeholder or node.phase == phase else node.named(node.name, phase)

    return replace(graph, nodes=tuple(map(phased, graph.nodes)))
