"""Recomputes in backward the values that forward does not save.

Backward reads a value either as a saved activation (:mod:`.saved_values`) or, if that is among the recomputed nodes,
from a copy of the chain of operations that produced it. The chain goes back to values that still exist: saved
activations, parameters, inputs. Copies have the same strategies as their originals, and random draws are a function of
their place, so that a copy equals its original bit by bit.

    %h: f32[4, 4] = aten.mm.default(%x, %w)
    %y: f32[4, 4] = aten.tanh.default(%h)
    %y_rest: f32[4, 4] = autopar.saved(%y)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %y_rest)

becomes, with ``y_rest``, ``y`` and ``h`` recomputed::

    backward %h_recomputed: f32[4, 4] = aten.mm.default(%x, %w)
    backward %y_recomputed: f32[4, 4] = aten.tanh.default(%h_recomputed)
    backward %y_rest_recomputed: f32[4, 4] = autopar.saved(%y_recomputed)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %y_rest_recomputed)

Each copy comes right before the first operation of backward that needs it, and there is one of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import RECOMPUTED, Node, Value
from autopar.ir.placements import Strategy
from autopar.passes.base import Pass

from .saved_values import save_activations


@dataclass(frozen=True)
class Recompute(Pass):
    """Recomputes ``nodes`` (names of forward operations and saved activations) for backward; see the module docstring.
    A value that a copy needs is saved if it was not; a saved activation that only backward read is not saved in
    forward."""

    name: ClassVar[str] = "recompute"
    nodes: frozenset[str]

    def apply(self, graph: Graph) -> Graph:
        return save_activations(_Copier(graph, self.nodes).run()).without_dead()


def recomputed(graph: Graph, assignment: Assignment) -> tuple[Graph, Assignment]:
    """``graph`` with the nodes that ``assignment`` recomputes copied into backward, and the assignment of all nodes."""
    if not assignment.recomputed:
        return graph, assignment
    with_copies = Recompute(assignment.recomputed)(graph)
    strategies = dict(assignment.strategies)
    for node in with_copies.nodes:
        if node.name in graph or node.is_placeholder:
            continue
        strategy = strategies.get(node.name) or strategies.get(node.name.removesuffix(RECOMPUTED))
        if strategy is None:
            source = node.operands[0]
            place = strategies[source.node].outputs[source.index]
            strategy = Strategy((place,), (place,))
        strategies[node.name] = strategy
    return with_copies, replace(assignment, strategies=strategies, recomputed=frozenset())


class _Copier:
    """Copies nodes in order, and inserts the chain that computes a recomputed value before its first backward user."""

    def __init__(self, graph: Graph, names: frozenset[str]) -> None:
        self.graph = graph
        self.names = {n.name for n in graph.nodes if n.name in names and n.phase == "forward" and not n.is_placeholder}
        self.nodes: list[Node] = []
        self.copied: set[str] = set()

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.phase == "backward" and any(value.node in self.names for value in node.operands):
                for value in node.operands:
                    self._copy(value.node)
                node = node.map_values(self._moved)
            self.nodes.append(node)
        return replace(self.graph, nodes=tuple(self.nodes))

    def _moved(self, value: Value) -> Value:
        return Value(value.node + RECOMPUTED, value.index) if value.node in self.names else value

    def _copy(self, name: str) -> None:
        """Appends the copy of ``name`` after those it needs; without recursion, since chains may be long."""
        waiting = [name]
        while waiting:
            here = waiting[-1]
            node = self.graph[here]
            missing = [v.node for v in node.operands if v.node in self.names and v.node not in self.copied]
            if here not in self.names or here in self.copied:
                waiting.pop()
            elif missing:
                waiting += reversed(missing)
            else:
                waiting.pop()
                self.copied.add(here)
                copy = node.map_values(self._moved)
                self.nodes.append(copy.named(here + RECOMPUTED, "backward"))
