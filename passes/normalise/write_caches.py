"""Names the operations that write rows into a cache, so that they are priced, and run, as writes in place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ops.write_rows import WRITE_ROWS
from autopar.passes.base import Pass, rewrite

_COPY = "aten.index_copy.default"


@dataclass(frozen=True)
class WriteCaches(Pass):
    """Replaces ``aten.index_copy`` into a cache by ``autopar.write_rows``, if nothing else reads the cache before."""

    name: ClassVar[str] = "write-caches"

    def apply(self, graph: Graph) -> Graph:
        return write_caches(graph)


def write_caches(graph: Graph) -> Graph:
    """See :class:`WriteCaches`."""
    if not graph.caches:
        return graph
    caches = {Value(node.name) for node in graph.caches.values()}

    def visit(node: Node) -> Node | Value:
        writes = node.op == _COPY and node.operands[0] in caches
        alone = writes and len(graph.users[node.operands[0]]) == 1 and node.operands[0] not in graph.output_values
        return replace(node, op=WRITE_ROWS) if alone else node

    return rewrite(graph, visit)
