"""Computes in backward again what forward does not keep for it.

Backward reads a value either from its saved activation (:mod:`.saved_values`) or, if that is among the recomputed
nodes, from a copy of the chain of operations that made it, which reaches back to values that are there: saved
activations that are kept, parameters, inputs. Copies choose as their originals do, and what an original draws at random
is a function of its place, so that a copy is equal to it bit by bit.

    %h: f32[4, 4] = aten.mm.default(%x, %w)
    %y: f32[4, 4] = aten.tanh.default(%h)
    %y_rest: f32[4, 4] = autopar.saved(%y)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %y_rest)

becomes, with ``y_rest``, ``y`` and ``h`` recomputed::

    backward %h_recomputed: f32[4, 4] = aten.mm.default(%x, %w)
    backward %y_recomputed: f32[4, 4] = aten.tanh.default(%h_recomputed)
    backward %y_rest_recomputed: f32[4, 4] = autopar.saved(%y_recomputed)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %y_rest_recomputed)

Each copy stands right before the first operation of backward that needs it, and is made once.
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
    A value that a copy needs and nothing keeps is saved; a saved activation that only backward read is not made in
    forward."""

    name: ClassVar[str] = "recompute"
    nodes: frozenset[str]

    def apply(self, graph: Graph) -> Graph:
        return save_activations(_Copier(graph, self.nodes).run()).without_dead()


def recomputed(graph: Graph, assignment: Assignment) -> tuple[Graph, Assignment]:
    """``graph`` with what ``assignment`` recomputes copied into backward, and the assignment of all its nodes."""
    if not assignment.recomputed:
        return graph, assignment
    made = Recompute(assignment.recomputed)(graph)
    strategies = dict(assignment.strategies)
    for node in made.nodes:
        if node.name in graph or node.is_placeholder:
            continue
        known = strategies.get(node.name) or strategies.get(node.name.removesuffix(RECOMPUTED))
        if known is None:
            source = node.operands[0]
            home = strategies[source.node].outputs[source.index]
            known = Strategy((home,), (home,))
        strategies[node.name] = known
    return made, replace(assignment, strategies=strategies, recomputed=frozenset())


class _Copier:
    """Copies nodes in order; before the first backward user of a recomputed value comes the chain that makes it."""

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
        """Appends the copy of ``name`` behind those it needs; without recursion, for chains may be long."""
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
                self.nodes.append(replace(copy, name=here + RECOMPUTED, phase="backward"))
