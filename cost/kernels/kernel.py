"""Kernels of a graph: operations that run as one, with the values that enter and leave them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost.compute.op_families import family_of
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, VIEWS, Node, Value


@dataclass(frozen=True)
class Kernel:
    """Nodes that run as one kernel (views and saved activations among them are free). ``reads`` and ``writes``: the
    values that enter and leave it, views resolved to what they are views of. ``recomputes``: the values of other
    kernels that it computes again, each from the sources that it reads in its place."""

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    recomputes: Mapping[Value, tuple[Value, ...]] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        return self.nodes[0].phase

    @property
    def heavy(self) -> Node | None:
        """The operation, if it never shares its kernel."""
        return self.nodes[0] if len(self.nodes) == 1 and is_heavy(self.nodes[0]) else None


@dataclass(frozen=True)
class Kernels:
    """The kernels of a graph in order, and the values saved for backward. ``rematerialised``: values that backward
    recomputes, with their sources."""

    graph: Graph
    kernels: tuple[Kernel, ...]
    saved: tuple[Value, ...]
    rematerialised: Mapping[Value, tuple[Value, ...]] = field(default_factory=dict)

    @cached_property
    def of(self) -> Mapping[str, Kernel]:
        return {node.name: kernel for kernel in self.kernels for node in kernel.nodes}


def is_heavy(node: Node) -> bool:
    """Whether the node is a separate kernel."""
    family = family_of(node.op)
    name = node.op.split(".")[1] if "." in node.op else node.op
    return family.matrix is not None or name in _ALONE


def is_lookup(node: Node) -> bool:
    """Whether the node reads rows that indices choose."""
    return node.op in _LOOKUPS


_LOOKUPS = frozenset(("aten.embedding.default", "aten.index.Tensor", "aten._unsafe_index.Tensor"))
_ALONE = frozenset(
    (
        *("embedding", "embedding_dense_backward", "gather_rows", "index", "index_put", "_unsafe_index_put"),
        *("index_add", "scatter", "scatter_add", "sort", "topk", "cumsum"),
        *("experts", "some_experts", "experts_backward", "some_experts_backward"),
    )
)


def is_alias(node: Node) -> bool:
    """Whether the node's result is its operand under another name: a view, or a saved activation."""
    return node.op in VIEWS or node.op == SAVED_ACTIVATION


def origin(graph: Graph, value: Value) -> Value:
    """The value that views and saved activations refer to."""
    node = graph[value.node]
    while is_alias(node):
        value = node.operands[0]
        node = graph[value.node]
    return value


def readers(graph: Graph, value: Value) -> Iterator[Node]:
    """The operations that read a value, also through views and as a saved activation."""
    for user, _ in graph.users.get(value, ()):
        if is_alias(user):
            yield from readers(graph, Value(user.name))
        else:
            yield user


def real_operands(graph: Graph, node: Node) -> list[Value]:
    return [origin(graph, value) for value in node.operands]


def users_of(graph: Graph) -> dict[Value, list[Node]]:
    """The operations that use each value, views resolved."""
    users: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        if not is_alias(node):
            for value in dict.fromkeys(real_operands(graph, node)):
                users.setdefault(value, []).append(node)
    return users
