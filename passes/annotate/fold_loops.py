"""Ties the steps of loops that a trace unrolled: a recurrence over a sequence, a scan spelled out.

Nothing names the steps of a loop in Python, as module paths name layers: they are found by what they have in common. In
one module, one operation on tensors of the same types with the same strategies, amid equal surroundings, as often as
no model spells out by hand, belongs to a loop. Surroundings tell which part of a step a node plays: they are equal if
operands and users are, and the operands and users of those, up to ``NEARBY`` away. Steps as near as that to an end of
the loop differ and stay apart. That all others choose alike is a restriction like that of equal layers, and loosened
with it: only steps of the same stretch of the loop are tied then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

from .equivalent_nodes import equivalence_key

# So often one module does the same amid the same in a loop, its ends left out.
# Chosen: no model spells out as many.
LEAST_STEPS = 16
# How far nodes must be alike in what is around them.
# Chosen: tells the operations of a step apart, and leaves out only the two steps at each end.
NEARBY = 2


def fold_loops(graph: Graph, classes: Mapping[str, str], apart: Container[str], groups: int = 1) -> dict[str, str]:
    """``classes`` with those united that play one part in the steps of a loop, or of the same of ``groups`` equal
    stretches of it; nodes named in ``apart`` stay where they are."""
    fixed = {found for name, found in classes.items() if name in apart}
    nodes = [node for node in graph.nodes if classes[node.name] == node.name and node.name not in fixed]
    steps = _steps(graph, nodes)
    colours: Mapping[str, Hashable] = steps
    for _ in range(NEARBY):
        numbers: dict[Hashable, int] = {}
        around = {name: _around(graph, graph[name], classes, colours) for name in steps}
        colours = {name: numbers.setdefault(found, len(numbers)) for name, found in around.items()}
    often, seen, first = Counter(colours.values()), Counter[Hashable](), dict[Hashable, str]()
    united: dict[str, str] = {}
    for name, colour in colours.items():
        if often[colour] >= LEAST_STEPS:
            stretch = seen[colour] * groups // often[colour]
            united[name] = first.setdefault((colour, stretch), name)
            seen[colour] += 1
    return {name: united.get(found, found) for name, found in classes.items()}


def _steps(graph: Graph, nodes: Iterable[Node]) -> dict[str, Hashable]:
    """The nodes that may belong to loops, with what each has in common with those that may play its part in other
    steps."""
    parts = {node.name: equivalence_key(graph, node, node.module) for node in nodes if not node.is_placeholder}
    often = Counter(parts.values())
    numbers: dict[Hashable, int] = {}
    known: dict[int, int] = {}
    found: dict[str, Hashable] = {}
    for name, part in parts.items():
        if often[part] >= LEAST_STEPS:
            ways = graph.strategies.get(name, ())
            if id(ways) not in known:
                known[id(ways)] = numbers.setdefault(ways, len(numbers))
            found[name] = part, known[id(ways)]
    return found


def _around(graph: Graph, node: Node, classes: Mapping[str, str], colours: Mapping[str, Hashable]) -> Hashable:
    """What there is to see from a node of a loop. Of what is outside of the loop it does not count which result it
    gives, nor which operand it takes: often the number of the step."""

    def colour(name: str, index: int) -> Hashable:
        found = classes[name]
        return (colours[found], index) if found in colours else found

    operands = tuple(colour(value.node, value.index) for value in node.operands)
    values = (Value(node.name, index) for index in range(len(node.types)))
    users = frozenset((value.index, colour(u.name, i)) for value in values for u, i in graph.users.get(value, ()))
    return colours[node.name], operands, users
