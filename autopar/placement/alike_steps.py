"""Which steps are alike, so that one of them is priced for all.

Most chunks of a deep model's pipeline hold equal layers, placed alike, between equal neighbours: their graphs differ in
the names of nodes, modules and parameters alone. The lines of one, renamed, are those of the others, in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.node import RECOMPUTED, Node
from autopar.passes.annotate.equivalent_nodes import EquivalenceKeys

from .breakdown import CostBreakdown, CostLine
from .placed_step import PlacedStep


def forms_of(steps: Sequence[PlacedStep]) -> tuple[int, ...]:
    """A number for each step, which steps have in common whose graphs are alike, and placed alike on the same devices.
    How often they run, and which parameters they do not store, is no part of it."""
    numbers, keys = _Numbers(), EquivalenceKeys(steps[0].graph)
    return tuple(numbers.of_value(tuple(_form(step, numbers, keys.on(step.graph)))) for step in steps)


class _Numbers:
    """Numbers of values, which equal values have in common. An object that occurs often is hashed once."""

    def __init__(self) -> None:
        self._of_object: dict[int, tuple[int, object]] = {}
        self._of_value: dict[Hashable, int] = {}

    def of_value(self, value: Hashable) -> int:
        return self._of_value.setdefault(value, len(self._of_value))

    def of(self, value: Hashable) -> int:
        found = self._of_object.get(id(value))
        if found is None:
            # With the object, so that no other gets its identity.
            found = self._of_object[id(value)] = self.of_value(value), value
        return found[0]


def _form(step: PlacedStep, numbers: _Numbers, keys: EquivalenceKeys) -> Iterator[Hashable]:
    graph, assignment, fused = step.graph, step.assignment, step.prices.fused
    positions, modules = dict[str, int](), {"": 0}
    yield id(step.prices), step.optimizer
    for position, node in enumerate(graph.nodes):
        positions[node.name] = position
        place = assignment.parameters[node.name] if node.op == "param" else assignment.strategies[node.name]
        yield keys.of(node, "")
        yield tuple([(positions[value.node], value.index) for value in node.operands])
        # Lines name the modules of nodes, and tell copies of nodes by their names.
        yield tuple([modules.setdefault(path, len(modules)) for path in _modules_of(node)])
        yield node.name.endswith(RECOMPUTED)
        yield numbers.of(place), node.name in assignment.offloaded
        yield None if fused is None else fused.entry(node.name)
    for output in graph.outputs:
        yield output.kind, output.value and (positions[output.value.node], output.value.index)
        if output.kind == "gradient":
            yield positions[graph.parameters[output.name].name]
        if output.kind == "mutation" and output.name in graph.caches:
            yield positions[graph.caches[output.name].name]
        if output.kind == "send":
            yield tuple(map(numbers.of, assignment.sends[output.name]))


def _modules_of(node: Node) -> tuple[str, ...]:
    """The modules that lines of ``node`` name."""
    return (node.module, node.target.rpartition(".")[0]) if node.op == "param" else (node.module,)


def renamed(breakdown: CostBreakdown, of: Graph, graph: Graph) -> CostBreakdown:
    """The cost breakdown of ``graph``, which is like the graph ``of`` that ``breakdown`` is of."""
    pairs = list(zip(of.nodes, graph.nodes, strict=True))
    names = {old.name: new.name for old, new in pairs}
    modules = {old: new for pair in pairs for old, new in zip(*map(_modules_of, pair), strict=True)}

    def line_of(line: CostLine) -> CostLine:
        if line.name not in names:  # Of a window, or of the agreement on overflow.
            return line
        module = modules.get(line.module, line.module)
        return CostLine(line.kind, names[line.name], module, line.phase, line.seconds, line.hops, line.times)

    return replace(breakdown, lines=tuple(map(line_of, breakdown.lines)))
