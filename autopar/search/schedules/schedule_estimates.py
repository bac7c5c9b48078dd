"""Which cuts and schedules of a pipeline to price, in the order of their estimated seconds.

An estimate simulates the schedule over a chain of chunks, whose seconds are sums of segments. It is only made where it
could decide: seconds that no schedule can beat (:func:`autopar.cost.step_lower_bound`) come first. Of a schedule with
many microbatches, the first rounds are simulated; each further microbatch adds what the busiest rank takes for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

from autopar.cost import step_lower_bound
from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices, SharedProcessors
from autopar.cost.pipeline.simulate import simulate
from autopar.schedule.messages import most_in_flight_of_chunks
from autopar.schedule.named import SCHEDULES, make_schedule
from autopar.schedule.schedule import Schedule, chain
from autopar.solver.problem import Ints

from .cuts import Segments, best_cuts

# Pairs of a chunk and a microbatch that an estimate simulates; of more, at least two rounds of the pipeline.
# Chosen: what takes a tenth of a second. After two rounds, all named schedules run steadily.
SIMULATED = 4096
# The share of its memory that roomier cuts fill: estimates of memory are mostly a little too low.
# Chosen: GPT of 128 layers on 16 stages was estimated at 0.999 of the limit, and priced at 1.006.
ROOMY = 0.98
# How near to the shares that chunks of the best cuts have of the memory of their rank those of cuts that fit are tried,
# if the best do not fit: 1 is the same, 0 are equal ones.
# Chosen: GPT-3 on 8 stages had no cuts with the same under ZB-V.
NEARNESS = (1.0, 0.75, 0.5, 0.25)
# Bounds and simulations add the same numbers in another order.
_ROUNDING = 1e-9
Item = TypeVar("Item")


@dataclass(frozen=True)
class Arranged:
    """A schedule ``kind`` (name, chunks of each stage) whose stages lie on the blocks of devices in ``order``."""

    kind: tuple[str, int]
    order: tuple[int, ...]
    microbatches: int

    @property
    def placement(self) -> tuple[int, ...]:
        name, chunks = self.kind
        return tuple(self.order[rank] for rank in SCHEDULES[name].placement(len(self.order), chunks))

    @property
    def simulated(self) -> int:
        """The microbatches that an estimate simulates."""
        stages = len(self.order)
        return min(self.microbatches, max(2 * stages, SIMULATED // (stages * self.kind[1])))

    @property
    def shortened(self) -> Schedule:
        """The schedule of :attr:`simulated` microbatches over a chain of chunks."""
        name, chunks = self.kind
        return make_schedule(name, len(self.order), self.simulated, chunks).reordered(self.order)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each chunk, the most microbatches in flight."""
        name, chunks = self.kind
        return _in_flight(name, len(self.order), self.microbatches, chunks)


@cache
def _in_flight(name: str, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """For each chunk of a named schedule the most microbatches in flight, from the computations alone."""
    named = SCHEDULES[name]
    orders = [named.order(rank, stages, microbatches, chunks) for rank in range(stages)]
    return most_in_flight_of_chunks(orders, stages * chunks)


@lru_cache(maxsize=64)
def _changes(name: str, stages: int, microbatches: int, chunks: int) -> tuple[tuple[Ints, Ints], ...]:
    """By rank of a named schedule, in order: the chunk of each computation that begins (1) or ends (-1) to hold what a
    microbatch saves there, and which of these."""
    changes = []
    for rank in range(stages):
        order = SCHEDULES[name].order(rank, stages, microbatches, chunks)
        begins = [a.kind == "forward" for a in order]
        counted = [i for i, a in enumerate(order) if begins[i] or a.kind in ("backward", "weight_gradient")]
        which = np.array([order[i].chunk for i in counted], dtype=np.int64)
        changes.append((which, np.array([1 if begins[i] else -1 for i in counted], dtype=np.int64)))
    return tuple(changes)


@dataclass(frozen=True)
class Estimates:
    """What estimates need: the segments ``on_blocks`` of devices, and which ranks share processors."""

    on_blocks: Sequence[Segments]
    shared: SharedProcessors | None

    def fullness(self, chosen: tuple[Arranged, tuple[str, ...]], limits: Sequence[float]) -> float:
        """The share of its limit that the fullest rank holds at least: parameters, saved activations of the
        microbatches in flight, and what one of its chunks needs to run. ``limits``: bytes by block of devices."""
        held = held_bytes(self.on_blocks, chosen)
        return max(size / limit if limit > 0 else math.inf for size, limit in zip(held, limits, strict=True))

    def in_order(self, found: Sequence[tuple[Arranged, tuple[str, ...]]]) -> Iterator[tuple[Arranged, tuple[str, ...]]]:
        """``found``, the quickest by its estimate first."""
        return in_order(found, self.bound, self.seconds) if len(found) > 1 else iter(found)

    def is_below(self, chosen: tuple[Arranged, tuple[str, ...]], seconds: float) -> bool:
        """Whether the estimate is below ``seconds``."""
        return self.bound(chosen) < seconds and self.seconds(chosen) < seconds

    def bound(self, chosen: tuple[Arranged, tuple[str, ...]]) -> float:
        """Seconds that no schedule of these chunks can beat."""
        arranged, cuts = chosen
        prices, split = self.prices(arranged, cuts), SCHEDULES[arranged.kind[0]].delays
        edges = chain(len(arranged.placement))
        return step_lower_bound(prices, arranged.placement, edges, arranged.microbatches, split) / prices.quickest

    def seconds(self, chosen: tuple[Arranged, tuple[str, ...]]) -> float:
        """The estimated seconds of a step."""
        arranged, cuts = chosen
        prices, busy = self.prices(arranged, cuts), [0.0] * len(arranged.order)
        for rank, price in zip(arranged.placement, prices.chunks, strict=True):
            busy[rank] += price.forward + price.whole_backward
        further = arranged.microbatches - arranged.simulated
        return simulate(arranged.shortened, prices).seconds + further * max(busy)

    def prices(self, arranged: Arranged, cuts: tuple[str, ...]) -> PipelinePrices:
        """Prices of a chain of chunks, estimated from the segments on each block."""
        starts, placement = chunk_starts(self.on_blocks, cuts), arranged.placement
        spans = zip(placement, pairwise(starts), strict=True)
        chunks = tuple(self.chunk(rank, a, b) for rank, (a, b) in spans)
        edges = {
            (c, c + 1): EdgePrice(latency=max(float(self.on_blocks[rank].wire[starts[c + 1]]) for rank in pair))
            for c, pair in enumerate(pairwise(placement))
            if pair[0] != pair[1]
        }
        return PipelinePrices(chunks, edges, shared=self.shared)

    def chunk(self, block: int, start: int, end: int) -> ChunkPrice:
        """The price of a chunk of segments ``start`` to ``end - 1``: forward, input gradient and weight gradient take a
        third of the seconds each."""
        third = float(self.on_blocks[block].seconds[start:end].sum()) / 3.0
        return ChunkPrice(third, third, third)


def in_order(items: Sequence[Item], bound: Callable[[Item], float], seconds: Callable[[Item], float]) -> Iterator[Item]:
    """``items`` sorted by ``seconds``, which are computed of those alone whose ``bound``, which is never more, comes
    first.

    >>> list(in_order([3.0, 1.0, 2.0], lambda item: 0.9 * item, lambda item: item))
    [1.0, 2.0, 3.0]
    """
    waiting = [(bound(item) * (1.0 - _ROUNDING), place, False) for place, item in enumerate(items)]
    heapq.heapify(waiting)
    while waiting:
        _, place, is_known = heapq.heappop(waiting)
        if is_known:
            yield items[place]
        else:
            heapq.heappush(waiting, (seconds(items[place]), place, True))


def cuts_of(
    on_blocks: Sequence[Segments], arranged: Arranged, limits: Sequence[float], pinned: Ints
) -> Iterator[tuple[str, ...]]:
    """The best cuts for a schedule whose chunks share the memory of their rank equally, if any fit, and those that
    leave a little of it. Where ranks have several chunks, also the best cuts of all: the first chunks have more
    microbatches in flight, so equal shares cut unevenly, or not at all, though together the chunks of a rank may fit.
    If they do not, those that share the memory as the best cuts of all would, as nearly as there are any
    (:data:`NEARNESS`). And the best of all where no others are found: by how much these do not fit tells how much
    memory to save.

    Args:
        limits: bytes for each device, by pipeline rank.
        pinned: for each segment, the rank that must hold it (-1: any).
    """
    known = set[tuple[str, ...]]()
    for cuts in _each_cuts(on_blocks, arranged, limits, pinned):
        if cuts not in known:
            known.add(cuts)
            yield cuts


def _each_cuts(
    on_blocks: Sequence[Segments], arranged: Arranged, limits: Sequence[float], pinned: Ints
) -> Iterator[tuple[str, ...]]:
    each, is_cut = arranged.kind[1], False
    for part in (1.0, ROOMY):
        cuts = cuts_at(on_blocks, arranged, pinned, tuple(part * limit / each for limit in limits))
        is_cut |= cuts is not None
        if cuts is not None:
            yield cuts
    freely = cuts_at(on_blocks, arranged, pinned, (math.inf,) * len(limits)) if each > 1 or not is_cut else None
    if freely is not None:
        yield freely
        if each > 1:
            yield from _sharing_as(on_blocks, (arranged, freely), limits, pinned)


def _sharing_as(
    on_blocks: Sequence[Segments], chosen: tuple[Arranged, tuple[str, ...]], limits: Sequence[float], pinned: Ints
) -> Iterator[tuple[str, ...]]:
    """Cuts whose chunks share the memory of their rank as those of ``chosen``, which does not fit, would, as nearly as
    there are any that fit: the nearer the shares are to equal ones, the more moves to chunks with less in flight."""
    arranged, _ = chosen
    held, needed = held_bytes(on_blocks, chosen), np.array(_bytes_of_chunks(on_blocks, chosen))
    if all(size <= limit for size, limit in zip(held, limits, strict=True)):
        return
    ranks, each = np.array(arranged.placement), arranged.kind[1]
    # The chunks of a rank do not all hold most at once.
    together = np.bincount(ranks, needed, len(limits))
    allowed = np.array(limits) * together / np.maximum(held, 1.0)
    segments = [on_blocks[rank] for rank in ranks]
    for nearness in NEARNESS:
        shares = nearness * needed / together[ranks] + (1.0 - nearness) / each
        cuts = best_cuts(segments, arranged.in_flight, (shares * allowed[ranks]).tolist(), ranks, pinned, each)
        fits = False
        for _ in range(2):
            if cuts is not None:
                yield cuts
                # Then with what ranks have left, or lack.
                sizes = held_bytes(on_blocks, (arranged, cuts))
                factors = [limit / max(size, 1.0) for size, limit in zip(sizes, limits, strict=True)]
                fits |= min(factors) >= 1.0
                cuts = cuts_with(on_blocks, (arranged, cuts), pinned, factors)
        if fits:
            return


def _bytes_of_chunks(on_blocks: Sequence[Segments], chosen: tuple[Arranged, tuple[str, ...]]) -> list[float]:
    """The most that each chunk holds, with its part of the bytes in which one of its rank runs."""
    arranged, cuts = chosen
    starts, found = chunk_starts(on_blocks, cuts), []
    for rank, count, (a, b) in zip(arranged.placement, arranged.in_flight, pairwise(starts), strict=True):
        static, saved, running = on_blocks[rank].bytes_of(a, b)
        found.append(static + count * saved + running / arranged.kind[1])
    return found


def held_bytes(on_blocks: Sequence[Segments], chosen: tuple[Arranged, tuple[str, ...]]) -> list[float]:
    """What each rank holds at least, by block of devices: parameters, saved activations of the microbatches in flight,
    and what one of its chunks needs to run."""
    arranged, cuts = chosen
    spans = list(pairwise(chunk_starts(on_blocks, cuts)))
    held, working, saved = [0.0] * len(on_blocks), [0.0] * len(on_blocks), np.zeros(len(spans))
    for chunk, (block, (a, b)) in enumerate(zip(arranged.placement, spans, strict=True)):
        static, saved[chunk], running = on_blocks[block].bytes_of(a, b)
        held[block] += static
        working[block] = max(working[block], running)
    changes = _changes(arranged.kind[0], len(arranged.order), arranged.microbatches, arranged.kind[1])
    for block, (which, change) in zip(arranged.order, changes, strict=True):
        held[block] += working[block] + float(np.cumsum(change * saved[which]).max(initial=0.0))
    return held


def cuts_with(
    on_blocks: Sequence[Segments], chosen: tuple[Arranged, tuple[str, ...]], pinned: Ints, factors: Sequence[float]
) -> tuple[str, ...] | None:
    """The best cuts for a schedule whose chunks hold at most ``factors`` times, by pipeline rank, as much as those of
    ``chosen``; None if there are none."""
    ranks, each = chosen[0].placement, chosen[0].kind[1]
    most = [factors[rank] * size for rank, size in zip(ranks, _bytes_of_chunks(on_blocks, chosen), strict=True)]
    segments = [on_blocks[rank] for rank in ranks]
    return best_cuts(segments, chosen[0].in_flight, most, np.array(ranks), pinned, each)


def chunk_starts(on_blocks: Sequence[Segments], cuts: tuple[str, ...]) -> list[int]:
    """The segments at which chunks begin, and the number of segments."""
    return [0, *(on_blocks[0].starts.index(name) + 1 for name in cuts), on_blocks[0].count]


def cuts_at(
    on_blocks: Sequence[Segments], arranged: Arranged, pinned: Ints, limits: Sequence[float]
) -> tuple[str, ...] | None:
    """The best cuts for a schedule with at most ``limits`` bytes a chunk, by pipeline rank; None if there are none."""
    ranks = arranged.placement
    segments, most = [on_blocks[rank] for rank in ranks], [limits[rank] for rank in ranks]
    return best_cuts(segments, arranged.in_flight, most, np.array(ranks), pinned, arranged.kind[1])
