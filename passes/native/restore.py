"""Undoes decompositions in a placed graph.

A model is traced into sums and pointwise operations where torch has one operation (log-softmax, batch norm), because
these stay exact when a dim they reduce is sharded. Where the chosen placements do not shard it, each device runs
torch's own kernel: fewer passes over memory, for the same numbers up to rounding. Which operations communicate, and
what, does not change.

    %largest: f32[4, 1] = aten.amax.default(%x, [1], True)
    %shifted: f32[4, 9] = aten.sub.Tensor(%x, %largest)
    %exp: f32[4, 9] = aten.exp.default(%shifted)
    %total: f32[4, 1] = aten.sum.dim_IntList(%exp, [1], True)
    %log: f32[4, 1] = aten.log.default(%total)
    %y: f32[4, 9] = aten.sub.Tensor(%shifted, %log)

becomes, unless dim 1 of ``x`` is sharded::

    %y: f32[4, 9] = aten._log_softmax.default(%x, 1, False)

To add an operation: a module with its ``REWRITES``, listed in :data:`MODULES`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

from . import batch_norm, batch_norm_backward, label_gradient, softmax
from .pattern import Occurrences
from .site import Replacement, Rewrite, Site

# In this order: a gradient's kernel takes what the kernel of forward gives.
MODULES = (softmax, label_gradient, batch_norm, batch_norm_backward)


def restore(graph: Graph, assignment: Assignment) -> tuple[Graph, Assignment]:
    """``graph``, with concrete sizes and saved activations, with torch's own operations where ``assignment`` allows,
    and the assignment of its nodes."""
    search = _Search(Occurrences(graph), assignment)
    rewrites: Sequence[Rewrite] = tuple(chain.from_iterable(module.REWRITES for module in MODULES))
    for rewrite in rewrites:
        search.apply(rewrite)
    if not search.replacements:
        return graph, assignment
    restored = _rewritten(graph, search.replacements)
    if restored is None:
        return graph, assignment
    strategies = dict(assignment.strategies)
    for each in search.replacements:
        strategies.update(each.strategies)
    return restored, replace(assignment, strategies=strategies)


@dataclass
class _Search:
    """Collects replacements of which no two replace the same node."""

    occurrences: Occurrences
    assignment: Assignment
    replacements: list[Replacement] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    earlier: dict[Value, Site] = field(default_factory=dict)

    def apply(self, rewrite: Rewrite) -> None:
        for match in self.occurrences.find(rewrite.pattern):
            own = {node.name for name, node in match.nodes.items() if name not in rewrite.kept}
            site = Site(self.occurrences, self.assignment, rewrite.pattern, match, self.earlier)
            given = {site[v.node].node for v in rewrite.pattern.section.outputs if v is not None}
            if (own - given | {match.nodes[rewrite.pattern.last.name].name}) & self.claimed:
                continue
            replacement = rewrite.build(site) if site.runs_whole(rewrite.kept) else None
            if replacement is not None:
                self.replacements.append(replacement)
                self.claimed |= own
                self.earlier.update((value, site) for key, value in match.values.items() if key.node in match.nodes)


def _rewritten(graph: Graph, replacements: Sequence[Replacement]) -> Graph | None:
    """The graph with the replacements, without what is no longer needed; None if no order computes it."""
    values: dict[Value, Value] = {}
    for each in reversed(replacements):  # Of two that give the same value, the first does.
        values.update(each.values)
    new = {node.name: node for each in replacements for node in each.nodes}

    def renamed(value: Value) -> Value:
        return values.get(value, value)

    nodes = tuple(new.get(node.name, node).map_values(renamed) for node in graph.nodes)
    outputs = tuple(replace(output, value=output.value and renamed(output.value)) for output in graph.outputs)
    ordered = _in_order(nodes)
    return None if ordered is None else replace(graph, nodes=ordered, outputs=outputs).without_dead()


def _in_order(nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """``nodes`` each after those it uses, else as they were; None if they use each other in a circle."""
    position = {node.name: index for index, node in enumerate(nodes)}
    sorter = TopologicalSorter({node.name: {value.node for value in node.operands} for node in nodes})
    try:
        sorter.prepare()
    except CycleError:
        return None
    # Of all nodes whose operands are there, the first of the old order follows.
    ready: list[int] = []
    ordered: list[Node] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, position[name])
        ordered.append(nodes[heapq.heappop(ready)])
        sorter.done(ordered[-1].name)
    return tuple(ordered)
