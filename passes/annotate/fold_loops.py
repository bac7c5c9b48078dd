"""Ties the steps of loops that a trace unrolled: a recurrence over a sequence, or a scan written out.

Unlike layers, which module paths name, the steps of a Python loop have no names, so they are recognised by what they
have in common. Nodes belong to a loop if one module has at least ``LEAST_STEPS`` of them with the same operation,
types, strategies and neighbourhood, which is more than any model writes out by hand. The neighbourhood tells which part
of a step a node is: it is equal if operands and users are equal, and theirs, up to ``NEARBY`` away. Steps that near to
an end of the loop differ and are not tied. That all others choose alike is a restriction like that of equal layers, and
it is relaxed with it: then only steps of the same stretch of the loop are tied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

from .equivalent_nodes import EquivalenceKeys

# The least number of equal nodes in a module that are taken for a loop, its ends excluded.
# Chosen: no model spells out as many.
LEAST_STEPS = 16
# The distance up to which the neighbourhoods of nodes must be equal.
# Chosen: tells the operations of a step apart, and leaves out only the two steps at each end.
NEARBY = 2


def fold_loops(graph: Graph, classes: Mapping[str, str], apart: Container[str], groups: int = 1) -> dict[str, str]:
    """``classes`` with equivalent nodes of a loop's steps united, or of steps in the same of ``groups`` equal
    stretches; nodes named in ``apart`` keep their classes."""
    fixed = {first for name, first in classes.items() if name in apart}
    nodes = [node for node in graph.nodes if classes[node.name] == node.name and node.name not in fixed]
    steps = _steps(graph, nodes)
    if not steps:
        return dict(classes)
    colours: Mapping[str, Hashable] = steps
    for _ in range(NEARBY):
        numbers: dict[Hashable, int] = {}
        around = {name: _around(graph, graph[name], classes, colours) for name in steps}
        colours = {name: numbers.setdefault(surroundings, len(numbers)) for name, surroundings in around.items()}
    counts, seen, first_of = Counter(colours.values()), Counter[Hashable](), dict[Hashable, str]()
    united: dict[str, str] = {}
    for name, colour in colours.items():
        if counts[colour] >= LEAST_STEPS:
            stretch = seen[colour] * groups // counts[colour]
            united[name] = first_of.setdefault((colour, stretch), name)
            seen[colour] += 1
    return {name: united.get(first, first) for name, first in classes.items()} if united else dict(classes)


def _steps(graph: Graph, nodes: Iterable[Node]) -> dict[str, Hashable]:
    """The nodes that may belong to loops, each with a key that equivalent nodes of other steps share."""
    described = EquivalenceKeys(graph)
    keys = {node.name: described.of(node, node.module) for node in nodes if not node.is_placeholder}
    counts = Counter(keys.values())
    numbers: dict[Hashable, int] = {}
    number_by_id: dict[int, int] = {}
    steps: dict[str, Hashable] = {}
    for name, key in keys.items():
        if counts[key] >= LEAST_STEPS:
            strategies = graph.strategies.get(name, ())
            if id(strategies) not in number_by_id:
                number_by_id[id(strategies)] = numbers.setdefault(strategies, len(numbers))
            steps[name] = key, number_by_id[id(strategies)]
    return steps


def _around(graph: Graph, node: Node, classes: Mapping[str, str], colours: Mapping[str, Hashable]) -> Hashable:
    """The neighbourhood of a node of a loop. For nodes outside of the loop the positions of results and operands do not
    count, since they are often the number of the step."""

    def colour(name: str, index: int) -> Hashable:
        first = classes[name]
        return (colours[first], index) if first in colours else first

    operands = tuple(colour(value.node, value.index) for value in node.operands)
    values = (Value(node.name, index) for index in range(len(node.types)))
    users = frozenset((value.index, colour(u.name, i)) for value in values for u, i in graph.users.get(value, ()))
    return colours[node.name], operands, users
