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
from autopar.placement.prices import BUCKET_BYTES
from autopar.runtime.rehearse.rehearsal import Footprint

from .exact_memory import bytes_of_update, footprint_of

# Layers that are kept at each end of what repeats in a stack, and how many more the second rehearsal has.
# Chosen: what the ends of forward and backward hold besides saved activations ends within two layers.
ENDS, MORE = 2, 2
# The least layers of a stack that are left out: below, a rehearsal of all takes not much longer than two of few.
# Chosen, not measured.
LEAST_OMITTED = 4
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
    """``graph`` (with classes) at smaller depths; None if it has no deep stack of equal layers. A stack of which values
    are read outside, layer by layer, keeps all of its layers."""
    stacks = [stack for stack in stacks_of(graph, LEAST_OMITTED) if _omitted(stack, 0) >= LEAST_OMITTED]
    stacks = [stack for stack in stacks if _at(graph, {stack: 0}) is not None]
    if not stacks:
        return None
    base = _at(graph, dict.fromkeys(stacks, 0))
    longer = [(_at(graph, {**dict.fromkeys(stacks, 0), stack: 1}), _missing(stack)) for stack in stacks]
    known = tuple((each, times) for each, times in longer if each is not None)
    return None if base is None or len(known) < len(longer) else ShortGraphs(base, known)


def _whole_turns(stack: Stack, count: int) -> int:
    """At least ``count`` layers of ``stack``, in whole turns."""
    return -(-count // stack.period) * stack.period


def _omitted(stack: Stack, more: int) -> int:
    """How many layers of ``stack`` are left out, if ``MORE`` of them, or a turn, are kept ``more`` times besides those
    at both ends."""
    kept = 2 * _whole_turns(stack, ENDS) + more * _whole_turns(stack, MORE)
    return max(0, (stack.last - stack.first - kept) // stack.period * stack.period)


def _missing(stack: Stack) -> float:
    """How many times ``MORE`` layers, or a turn, are left out."""
    return _omitted(stack, 0) / (_omitted(stack, 0) - _omitted(stack, 1))


def _at(graph: Graph, more: Mapping[Stack, int]) -> Graph | None:
    """``graph`` with few layers of these stacks; None if what lies outside of one reads values of all layers."""
    try:
        for stack, each in more.items():
            graph = OmitLayers(stack, stack.first + _whole_turns(stack, ENDS), _omitted(stack, each))(graph)
    except GraphError:
        return None
    return graph


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
