"""What backward recomputes of a recipe: operations of the modules that it names, and of elementwise recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from autopar.cost.kernels.kernel import Kernels, is_alias, origin
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value


def rematerialised_nodes(graph: Graph, rematerialised: Mapping[Value, Set[Value]]) -> frozenset[str]:
    """The operations that recompute values from the sources that
    :func:`benchmarks.emulator.sections.rematerialised.rematerialisable` returns."""
    names = set[str]()
    for value, sources in rematerialised.items():
        waiting = [value]
        while waiting:
            node = graph[waiting.pop().node]
            if not node.is_placeholder and node.name not in names:
                names.add(node.name)
                waiting += [operand for operand in node.operands if operand not in sources]
    return frozenset(names)


@dataclass(frozen=True)
class Rematerialised:
    """The operations that backward recomputes of modules that a recipe names.

    ``nodes``: their names. ``dropped``: their results that need not be saved. ``taken``: values that are saved only for
    this recomputation."""

    nodes: frozenset[str] = frozenset()
    dropped: frozenset[Value] = frozenset()
    taken: frozenset[Value] = frozenset()


def recomputed_operations(
    kernels: Kernels, named: Callable[[Node], bool], section_of_node: Mapping[str, str]
) -> Rematerialised:
    """What backward recomputes if no result of ``named`` operations is saved: these operations, back to the first
    values that other operations compute. Values that a section hands to another one are saved, so that each section is
    recomputed separately, from its inputs. ``section_of_node``: the section of each operation."""
    graph, kept = kernels.graph, set(kernels.saved)
    handed_on = _handed_on(kernels, section_of_node)

    def stays(value: Value) -> bool:
        return value in handed_on or not named(graph[value.node])

    dropped = frozenset(value for value in kept if not stays(value))
    nodes, outside = set[str](), set[Value]()
    waiting = list(dropped)
    while waiting:
        value = waiting.pop()
        node = graph[value.node]
        if stays(value):
            outside.add(value)
        elif node.name not in nodes:
            nodes.add(node.name)
            waiting += (origin(graph, operand) for operand in node.operands)
    taken = frozenset(value for value in outside - kept if not graph[value.node].is_placeholder)
    return Rematerialised(frozenset(nodes), dropped, taken)


def _handed_on(kernels: Kernels, section_of_node: Mapping[str, str]) -> Set[Value]:
    """The values that another section reads in forward; for values that backward recomputes, their sources."""
    graph, handed_on = kernels.graph, set[Value]()
    forward = (node for node in graph.nodes if node.phase == "forward" and not is_alias(node))
    reads = ((origin(graph, operand), section_of_node[node.name]) for node in forward for operand in node.operands)
    waiting = [value for value, section in reads if section_of_node[value.node] != section]
    while waiting:
        value = waiting.pop()
        if value not in handed_on:
            handed_on.add(value)
            waiting += kernels.rematerialised.get(value, ())
    return handed_on
