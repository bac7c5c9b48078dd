"""The bill of a deep step from few of its layers: what a layer costs and holds counts for every layer like it.

The lines of a cost breakdown, and the bytes that it counts, are those of single nodes and values. So those of layers
that are left out (:mod:`autopar.passes.annotate.few_layers`) are those of the layers that they repeat, if these are
placed alike and tied alike to what is around them. Sums of seconds are those of the whole step up to rounding, and
bytes are equal. (What a rehearsal measures is no such sum: see :mod:`.short_rehearsal`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph
from autopar.passes.annotate.few_layers import FewLayers
from autopar.passes.annotate.omit_layers import number_in
from autopar.placement.breakdown import CostBreakdown, cost_breakdown
from autopar.placement.formulation import Instance
from autopar.placement.item_prices import agreement_seconds
from autopar.placement.overlap_windows import windows_of
from autopar.placement.placed_step import PlacedStep
from autopar.solver.problem import Ints


@dataclass(frozen=True, eq=False)
class FoldedGraph:
    """``few``: a graph without the layers that repeat others; ``counts``: by name, how many nodes of the whole graph
    those stand for that stand for several."""

    few: Graph
    counts: Mapping[str, int]


def folded_graph_of(graph: Graph) -> FoldedGraph | None:
    """``graph`` (with classes) with few layers; None if it has no deep stack whose layers are tied alike to what is
    around them. Found once for a graph."""
    return graph.once(folded_graph_of, lambda: _folded(graph))


def _folded(graph: Graph) -> FoldedGraph | None:
    few, stacks = FewLayers().shortened(graph)
    counts: dict[str, int] = {}
    for omitted in map(FewLayers().omits, stacks):
        repeated, times = omitted.repeated(graph), 1 + omitted.count // omitted.stack.period
        if repeated is None:
            return None
        counts.update((node.name, times) for node in few.nodes if number_in(node, omitted.stack.path) in repeated)
    return FoldedGraph(few, counts) if stacks else None


def folded_bill(instance: Instance, choices: Ints) -> CostBreakdown | None:
    """The cost breakdown of the step that ``choices`` of ``instance`` mean, a line for all layers that are alike; None
    if it has none, or saves memory: what is recomputed or fetched is held together with that of other layers."""
    folded, whole = folded_graph_of(instance.graph), instance.graph
    if folded is None:
        return None
    assignment = replace(instance, graph=folded.few).assignment(choices)
    places = assignment.parameters.values()
    if assignment.recomputed or assignment.offloaded or any(place.offload for place in places):
        return None
    prices, repeats = instance.prices, instance.repeats
    step = PlacedStep(folded.few, assignment, prices, instance.optimizer, repeats, counts=folded.counts)
    agreement = agreement_seconds(prices, (whole,))
    return cost_breakdown(step, agreement, windows_of(whole, prices.cluster, repeats))
