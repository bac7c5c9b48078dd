"""Blocks of experts in a graph: the operations, what they read, and the parameters that choose experts."""

from __future__ import annotations

from autopar.cost import family_of
from autopar.cost.kernels.kernel import origin
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

FORWARD, BACKWARD = "autopar.experts.default", "autopar.experts_backward.default"
OPERATIONS = frozenset((FORWARD, BACKWARD))
# Operands of the forward operation: tokens, then choices and their weights, then tensors with an entry for each expert.
# By the schema of autopar.experts (autopar/ops/experts.py).
CHOICES, MATRICES = 1, 3


def expert_blocks(graph: Graph) -> dict[Node, int]:
    """The blocks of experts of a graph, with how many experts they have."""
    return {node: number_of_experts(graph, node) for node in graph.nodes if node.op == FORWARD}


def number_of_experts(graph: Graph, block: Node) -> int:
    """How many experts a block has."""
    return int(graph.type_of(block.operands[MATRICES]).shape[0])


def routers(graph: Graph) -> frozenset[str]:
    """Parameters whose products choose experts, by node name. They are never sharded."""
    names: set[str] = set()
    seen: set[str] = set()
    waiting = [value.node for node in graph.nodes if node.op == FORWARD for value in node.operands[CHOICES:MATRICES]]
    while waiting:
        node = graph[waiting.pop()]
        if node.name in seen or node.is_placeholder:
            continue
        seen.add(node.name)
        if family_of(node.op).matrix is None:
            waiting += [value.node for value in node.operands]
        else:
            names |= {source_of(graph, value) for value in node.operands}
    return frozenset(name for name in names if graph[name].op == "param")


def source_of(graph: Graph, value: Value) -> str:
    """The node that a value is computed from by views and casts."""
    node = graph[origin(graph, value).node]
    while not node.is_placeholder and len(node.operands) == 1:
        node = graph[origin(graph, node.operands[0]).node]
    return node.name
