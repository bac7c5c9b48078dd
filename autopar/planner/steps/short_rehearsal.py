"""The memory of a deep step, from rehearsals of steps with few of its layers.

The bytes that are live at a point of a step grow by as much with each further layer, as long as layers are equal. So
two rehearsals of few layers tell what many hold, but for what does not repeat from layer to layer: buckets of gradients
that hold parts of several. What is found is an estimate, to be confirmed by a rehearsal of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.ir.graph import Graph
from autopar.passes.annotate.few_layers import FewLayers
from autopar.passes.recompute.recompute import recomputed
from autopar.placement.alternatives import holdings
from autopar.placement.memory_bound import host_memory
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import BUCKET_BYTES
from autopar.runtime.rehearse.rehearsal import Footprint

from .exact_memory import bytes_of_update, footprint_of

# How many buckets the gradients of the fewest layers fill at least. Chosen: with less than one, a stack of 210 layers
# was estimated at 1.36 of its peak.
LEAST_BUCKETS = 2
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class ShortGraphs:
    """``base``: a graph with few of its layers; ``longer``: the same with some more layers of one stack, each with the
    number of times that so many are left out of it."""

    base: Graph
    longer: tuple[tuple[Graph, float], ...]


def short_graphs(graph: Graph) -> ShortGraphs | None:
    """``graph`` (with classes) at smaller depths; None if it has no deep stack of equal layers."""
    base, stacks = FewLayers().shortened(graph)
    longer: list[tuple[Graph, float]] = []
    for stack in stacks:
        few = FewLayers(longer=stack.path)
        own, shortened = few.shortened(graph)
        if shortened != stacks:
            return None
        longer.append((own, few.missing(stack)))
    return ShortGraphs(base, tuple(longer)) if stacks else None


def estimated_peak(step: PlacedStep, short: ShortGraphs) -> int | None:
    """The peak bytes of ``step`` (whose assignment says what is recomputed, and whose graph has no copies of it yet) by
    rehearsals of ``short``, which is of its graph. Of a step that is rehearsed (:func:`.is_rehearsed`). None if it
    cannot be, or if its layers have so small gradients that buckets hold those of all layers of ``short``: many layers
    hold fewer buckets then."""
    if _gradient_bytes(step, short.base) < LEAST_BUCKETS * BUCKET_BYTES:
        return None
    base, *longer = (_placed(step, graph) for graph in (short.base, *(graph for graph, _ in short.longer)))
    try:
        least, *more = map(footprint_of, (base, *longer))
    except Exception:  # Any operation may lack an implementation for tensors without data: then so does the whole step.
        return None
    states, update = bytes_of_update(holdings(step), host_memory(step))
    *peaks, after = _extrapolated(least, list(zip(more, (times for _, times in short.longer), strict=True)))
    return int(max(*peaks, after + update)) + states


def _gradient_bytes(step: PlacedStep, short: Graph) -> int:
    """The bytes of all gradients of parameters in ``short``, as backward computes them."""
    prices, assignment = step.prices, step.assignment
    values = dict.fromkeys(short.gradients.values())
    return sum(prices.held(short.type_of(value), assignment.placements_of(value)) for value in values)


def _extrapolated(base: Footprint, longer: list[tuple[Footprint, float]]) -> Iterator[float]:
    """The peaks of the parts of the step at its full depth, and what rests after it."""
    for part, held in enumerate(_parts(base)):
        yield held + sum(times * (_parts(each)[part] - held) for each, times in longer)


def _parts(footprint: Footprint) -> tuple[int, ...]:
    return (*footprint.peaks, footprint.stored + footprint.accumulated)


def _placed(step: PlacedStep, short: Graph) -> PlacedStep:
    """``step`` with the layers of ``short`` alone, and with the copies of what is recomputed."""
    whole = step.assignment
    own = replace(
        whole,
        strategies=_within(whole.strategies, short),
        parameters=_within(whole.parameters, short),
        recomputed=frozenset(name for name in whole.recomputed if name in short),
        offloaded=frozenset(name for name in whole.offloaded if name in short),
    )
    graph, placed = recomputed(short, own)
    return replace(step, graph=graph, assignment=placed)


def _within(choices: Mapping[str, Value], graph: Graph) -> dict[str, Value]:
    return {name: choice for name, choice in choices.items() if name in graph}
