"""What a pass is: a frozen dataclass whose fields are its options, called on a graph, and valid graphs on
both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Output, Phase, Value
from autopar.torch_internals.operators import OpOverload, is_mutable

# Results of these depend on strides, which a graph does not show and dropping a copy may change.
LAYOUT_SENSITIVE = frozenset(("aten.as_strided.default", "aten.view.dtype", "aten.as_strided_scatter.default"))


class Pass(ABC):
    """Graph to graph. Subclasses are frozen dataclasses with a kebab-case ``name`` and an ``apply``;
    calling one also verifies.

    >>> from autopar.passes.normalise.eliminate_dead import RemoveDead
    >>> RemoveDead().name
    'remove-dead'
    """

    name: ClassVar[str]

    @abstractmethod
    def apply(self, graph: Graph) -> Graph:
        """The new graph; ``graph`` itself cannot change."""

    def __call__(self, graph: Graph) -> Graph:
        """``apply``, with the graph verified before and after. Raises :class:`GraphError` carrying the
        printed graph.
        """
        self._verified(graph, "before")
        return self._verified(self.apply(graph), "after")

    def _verified(self, graph: Graph, when: str) -> Graph:
        try:
            return graph.verify()
        except GraphError as error:
            raise GraphError(f"{when} pass {self.name}: {error}\n{graph.to_text()}") from error


def run(passes: Iterable[Pass], graph: Graph) -> Graph:
    """The graph after all ``passes``, one after the other."""
    for step in passes:
        graph = step(graph)
    return graph


def rewrite(graph: Graph, visit: Callable[[Node], Node | Value]) -> Graph:
    """Replaces each node by what ``visit`` makes of it: a node of the same name, or an older value that is
    its (first) result.

    ``visit`` sees nodes in order, with operands already replaced; placeholders are left alone.
    """
    renamed: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if any(value in renamed for value in node.operands):
            node = node.map_values(lambda value: renamed.get(value, value))
        found = node if node.is_placeholder else visit(node)
        if isinstance(found, Value):
            renamed.update((Value(node.name, i), Value(found.node, found.index + i)) for i in range(len(node.types)))
        else:
            nodes.append(found)
    outputs = tuple(_renamed(output, renamed) for output in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _renamed(output: Output, renamed: dict[Value, Value]) -> Output:
    if output.value is None or output.value not in renamed:
        return output
    return replace(output, value=renamed[output.value])


@cache
def is_pure(op: str) -> bool:
    """Whether equal operands give equal results and nothing else happens: an operation of ATen or autopar that neither
    writes nor takes numbers from a generator. Unknown operations are not."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace in ("aten", "autopar") and name else None
    found = getattr(packet, overload, None)
    if not isinstance(found, OpOverload):
        return False
    return not is_mutable(found) and torch.Tag.nondeterministic_seeded not in found.tags


def with_phases(graph: Graph) -> Graph:
    """Phases by their definition: forward is what an output or a mutation needs, backward what only
    gradients need.
    """
    results = (o.value for o in graph.outputs if o.kind in ("output", "mutation"))
    needed = graph.needed_for(value for value in results if value is not None)

    def phased(node: Node) -> Node:
        phase: Phase = "forward" if node.name in needed else "backward"
        return node if node.is_placeholder or node.phase == phase else replace(node, phase=phase)

    return replace(graph, nodes=tuple(map(phased, graph.nodes)))
