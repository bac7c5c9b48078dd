"""The memory of a deep step, from rehearsals of steps with few of its layers.

The bytes that are live at a point of a step grow by as much with each further layer, as long as layers are equal. So
two rehearsals of few layers tell what many hold, but for what does not repeat from layer to layer: buckets of gradients
that hold parts of several. What is found is an estimate, to be confirmed by a rehearsal of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.passes.annotate.omit_layers import OmitLayers, Stack, stacks_of
from autopar.passes.recompute.recompute import recomputed
from autopar.placement.alternatives import holdings
from autopar.placement.memory_bound import host_memory
from autopar.placement.placed_step import PlacedStep
from autopar.runtime.rehearse.rehearsal import Footprint

from .exact_memory import bytes_of_update, footprint_of, is_rehearsed

# Layers that are kept at each end of what repeats in a stack, and how many more the second rehearsal has.
# Chosen: what the ends of forward and backward hold besides saved activations ends within two layers.
ENDS, MORE = 2, 2
# The least layers of a stack that are left out: below, a rehearsal of all takes not much longer than two of few.
# Chosen, not measured.
LEAST_OMITTED = 4
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class ShortGraphs:
    """``base``: a graph with few of its layers; ``longer``: the same with some more layers of one stack, each with the
    number of times that so many are left out of it."""

    base: Graph
    longer: tuple[tuple[Graph, float], ...]


def short_graphs(graph: Graph) -> ShortGraphs | None:
    """``graph`` (with classes) at smaller depths; None if it has no deep stack of equal layers, or if what lies outside
    of a stack reads values of layers inside."""
    stacks = stacks_of(graph, 2 * ENDS + MORE + LEAST_OMITTED)
    stacks = tuple(stack for stack in stacks if _omitted(stack, 0) > _omitted(stack, 1) > 0)
    if not stacks:
        return None
    depths = [[int(stack is longer) for stack in stacks] for longer in (None, *stacks)]
    try:
        base, *longer = (_at(graph, stacks, depth) for depth in depths)
    except GraphError:
        return None
    missing = (_omitted(stack, 0) / (_omitted(stack, 0) - _omitted(stack, 1)) for stack in stacks)
    return ShortGraphs(base, tuple(zip(longer, missing, strict=True)))


def _omitted(stack: Stack, more: int) -> int:
    """How many layers of ``stack`` are left out, if ``MORE`` of them, or a period, are kept ``more`` times."""
    period = stack.period
    ends, longer = (-(-count // period) * period for count in (2 * ENDS, MORE))
    return max(0, (stack.last - stack.first - ends - more * longer) // period * period)


def _at(graph: Graph, stacks: tuple[Stack, ...], more: list[int]) -> Graph:
    for stack, each in zip(stacks, more, strict=True):
        begin = stack.first + max(ENDS, stack.period)
        graph = OmitLayers(stack, begin, _omitted(stack, each))(graph)
    return graph


def estimated_peak(step: PlacedStep, short: ShortGraphs) -> int | None:
    """The peak bytes of ``step`` (whose assignment says what is recomputed, and whose graph has no copies of it yet) by
    rehearsals of ``short``, which is of its graph. None if the step is not rehearsed, or cannot be."""
    if not is_rehearsed(step):
        return None
    try:
        base = footprint_of(_placed(step, short.base))
        longer = [(footprint_of(_placed(step, graph)), times) for graph, times in short.longer]
    except Exception:  # Any operation may lack an implementation for tensors without data: then so does the whole step.
        return None
    states, update = bytes_of_update(holdings(step), host_memory(step))
    *peaks, after = _extrapolated(base, longer)
    return int(max(*peaks, after + update)) + states


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
