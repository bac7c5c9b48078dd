"""The cost of a pipeline: each chunk's cost breakdown, and the step under a schedule.

The cost breakdown of a chunk counts what its devices do in a step, so its lines add up like those of a plan without
stages. Since stages wait for each other, the step takes longer than the cost breakdown of any stage. The simulator
(:mod:`autopar.cost.pipeline.simulate`) replays the schedule with the durations of these lines. What it adds to the
busiest stage is the bubble.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster.description import Cluster
from autopar.cost.collective.point_to_point import rate_between
from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices, SharedProcessors
from autopar.cost.pipeline.simulate import Simulation, simulate
from autopar.ir.microbatching import Repeats
from autopar.ir.placements import Placements
from autopar.ir.staged_graph import Edge
from autopar.placement.alike_steps import forms_of, renamed
from autopar.placement.breakdown import CostBreakdown, cost_breakdown
from autopar.placement.item_prices import agreement_seconds
from autopar.placement.memory_bound import Memory, memory, offloaded_activation_bytes, saved_bytes
from autopar.placement.overlap_windows import gather_windows, hidden_shares
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import Prices
from autopar.schedule.schedule import Schedule
from autopar.search.schedules.chunks import Chunk, WirePrice, WirePrices, edge_bytes, meshes_of

from .chunk_price import chunk_price, sections_of
from .shared_parameters import shared_parameters


@dataclass(frozen=True)
class PipelineBreakdown:
    """The cost breakdowns of all chunks, and the simulated step."""

    chunks: tuple[Chunk, ...]
    breakdowns: tuple[CostBreakdown, ...]
    prices: PipelinePrices
    simulation: Simulation
    schedule: Schedule

    @property
    def seconds(self) -> float:
        return self.simulation.seconds

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Peak bytes of each pipeline rank's devices. They hold all chunks of the rank; one computes at a time. Of
        several rooms (:mod:`autopar.placement.rooms`), as they count in the smallest."""
        held = self.schedule.held
        return tuple(
            sum(self.breakdowns[c].memory.peak - self.breakdowns[c].memory.temporary for c in chunks)
            + max(self.breakdowns[c].memory.temporary for c in chunks)
            for chunks in held
        )

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, for each device of the pipeline rank with most of it."""
        return max(sum(self.breakdowns[c].memory.host for c in chunks) for chunks in self.schedule.held)

    @property
    def fullest(self) -> int:
        """The pipeline rank with the highest memory peak."""
        return max(range(len(self.peaks)), key=lambda rank: self.peaks[rank])


def wire_prices(
    cluster: Cluster, placement: tuple[int, ...], blocks: Sequence[range], pairs: tuple[tuple[int, int], ...]
) -> WirePrices:
    """The price of the wire of each of ``pairs`` of chunks, 0 within a rank. ``placement``: chunk to rank; ``blocks``:
    the devices of each rank."""
    wires: dict[tuple[int, int], WirePrice] = {}
    for pair in pairs:
        source, target = placement[pair[0]], placement[pair[1]]
        rate = (0.0, float("inf")) if source == target else rate_between(cluster, blocks[source], blocks[target])
        wires[pair] = WirePrice(*rate)
    return wires


def slowest_wire(cluster: Cluster, blocks: Sequence[range]) -> WirePrice:
    """The slowest wire between stages on neighbouring ``blocks`` of devices, and from the last to the first."""
    ranks = tuple(range(len(blocks)))
    wires = wire_prices(cluster, ranks, blocks, tuple(zip(ranks, (*ranks[1:], 0), strict=True)))
    return min(wires.values(), key=lambda wire: wire.bandwidth)


def shared_processors(cluster: Cluster, sizes: Sequence[int]) -> SharedProcessors | None:
    """Which stages share the processors of a host, and how quick they are while others wait; None if no two stages
    share processors. ``sizes``: the devices of each stage. Prices assume that all devices of a host are at work. A
    stage on several hosts counts on that of its first device, with all of its devices."""
    firsts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    hosts = tuple(first // cluster.sharing for first in firsts)
    if cluster.sharing == cluster.cores or len(set(hosts)) == len(hosts):
        return None
    usual = cluster.speed(min(cluster.sharing, sum(sizes)))
    alike = len(set(sizes)) == 1
    together = Counter[int]()
    for host, size in zip(hosts, sizes, strict=True):
        together[host] += 1 if alike else size
    each = sizes[0] if alike else 1
    speeds = tuple(cluster.speed(k * each) / usual for k in range(1, max(together.values()) + 1))
    return SharedProcessors(hosts, speeds, () if alike else tuple(sizes))


def price_stages(
    chunks: tuple[Chunk, ...],
    wires: Mapping[Edge, Placements],
    schedule: Schedule,
    prices: Sequence[Prices],
    links: WirePrices,
    optimizer: str,
    cluster: Cluster,
) -> PipelineBreakdown:
    """The cost breakdown of a cut and placed graph under ``schedule``. ``prices``: by pipeline rank, those of its
    devices, which are part of ``cluster``."""
    priced = _priced(chunks, schedule, prices, optimizer, cluster)
    breakdowns = tuple(breakdown for breakdown, _ in priced)
    step = max(sum(breakdowns[c].seconds_of("optimizer", "offload", "refresh") for c in held) for held in schedule.held)
    of_pipeline = PipelinePrices(
        tuple(price for _, price in priced),
        _edge_prices(chunks, wires, links),
        step=step,
        hides=cluster.overlaps,
        shared=shared_processors(cluster, [own.devices for own in prices]),
    )
    return PipelineBreakdown(chunks, breakdowns, of_pipeline, simulate(schedule, of_pipeline), schedule)


def _priced(
    chunks: tuple[Chunk, ...], schedule: Schedule, prices: Sequence[Prices], optimizer: str, cluster: Cluster
) -> list[tuple[CostBreakdown, ChunkPrice]]:
    """The cost breakdown of each chunk on its rank's devices, and its price; one for all chunks that are alike and run
    alike. The first chunk of each rank includes the agreement on overflow, which every device makes once a step."""
    steps = _steps(chunks, schedule, prices, optimizer)
    forms = forms_of(steps)
    most, first = _most_in_flight(schedule, steps, forms), {held[0] for held in schedule.held}
    whole = meshes_of(chunks, schedule.placement).whole
    agreement = agreement_seconds(prices[0], (chunk.graph for chunk in chunks), whole)
    shared = shared_parameters(chunks, schedule.placement, cluster)
    known: dict[Hashable, tuple[Chunk, CostBreakdown, ChunkPrice]] = {}
    held: dict[Hashable, Memory] = {}
    found = []
    for chunk, once, lent, form in zip(chunks, steps, shared, forms, strict=True):
        repeats = Repeats(schedule.microbatches, most[chunk.index], accumulates=True)
        backwards, agreeing = schedule.weight_gradients(chunk.index), agreement if chunk.index in first else 0.0
        borrowed = tuple(lent.get(node.target) for node in chunk.graph.placeholders("param"))
        key = form, tuple(backwards), agreeing, borrowed
        step = replace(once, repeats=repeats, shared_parameters=lent)
        if key not in known:
            known[key] = chunk, *_price_chunk(chunk, step, backwards, agreeing, cluster)
            held[key, repeats] = known[key][1].memory
        if (key, repeats) not in held:  # How many microbatches are in flight changes what is held, and no seconds.
            held[key, repeats] = memory(step)
        like, breakdown, price = known[key]
        breakdown = replace(breakdown, memory=held[key, repeats])
        found.append((breakdown if like is chunk else renamed(breakdown, like.graph, chunk.graph), price))
    return found


def _price_chunk(
    chunk: Chunk, step: PlacedStep, backwards: Sequence[str], agreeing: float, cluster: Cluster
) -> tuple[CostBreakdown, ChunkPrice]:
    """The cost breakdown of one chunk, whose ``backwards`` are as of :meth:`.Schedule.weight_gradients`, and its
    price."""
    share, section_of = hidden_shares(chunk.graph, cluster), sections_of(chunk.graph)
    windows = gather_windows(share, step.repeats.microbatches, backwards)
    breakdown = cost_breakdown(step, agreeing, windows, section_of)
    return breakdown, chunk_price(chunk, breakdown, share, section_of, step.prices)


def in_flight_at_peak(
    chunks: tuple[Chunk, ...], schedule: Schedule, prices: Sequence[Prices], optimizer: str
) -> tuple[int, ...]:
    """For each chunk, the microbatches in flight at the moment when its rank holds most saved bytes, those in
    host memory included; at least one. The chunks of a rank do not all have their most in flight at once."""
    steps = _steps(chunks, schedule, prices, optimizer)
    return _most_in_flight(schedule, steps, forms_of(steps))


def _steps(chunks: tuple[Chunk, ...], schedule: Schedule, prices: Sequence[Prices], optimizer: str) -> list[PlacedStep]:
    """Each chunk as a step that runs once."""
    owns = [prices[rank] for rank in schedule.placement]
    return [PlacedStep(c.graph, c.assignment, own, optimizer) for c, own in zip(chunks, owns, strict=True)]


def _most_in_flight(schedule: Schedule, steps: Sequence[PlacedStep], forms: Sequence[int]) -> tuple[int, ...]:
    """As :func:`in_flight_at_peak`, for chunks as ``steps``, of these ``forms``."""
    saved: dict[int, int] = {}
    for step, form in zip(steps, forms, strict=True):
        if form not in saved:
            saved[form] = saved_bytes(step) + offloaded_activation_bytes(step)
    counts = _counts_at_peak(schedule, [saved[form] for form in forms])
    return tuple(max(1, count) for _, count in sorted(counts))


def _counts_at_peak(schedule: Schedule, saved: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each chunk with its microbatches in flight at its rank's peak; ``saved``: bytes of one, by chunk."""
    for held, listed in zip(schedule.held, schedule.ranks, strict=True):
        counts = dict.fromkeys(held, 0)
        bytes_now = most = 0
        at_peak = dict(counts)
        for action in listed:
            change = (action.kind == "forward") - (action.kind in ("weight_gradient", "backward"))
            if change:
                counts[action.chunk] += change
                bytes_now += change * saved[action.chunk]
            if bytes_now > most:
                most, at_peak = bytes_now, dict(counts)
        yield from at_peak.items()


def _edge_prices(
    chunks: tuple[Chunk, ...], wires: Mapping[Edge, Placements], links: WirePrices
) -> dict[tuple[int, int], EdgePrice]:
    """By pair of chunks, the price of the edge, with the bytes that one rank sends forward and back."""
    sizes: dict[tuple[int, int], float] = {}
    for edge, nbytes in edge_bytes(chunks, wires).items():
        key = (edge.source, edge.target)
        sizes[key] = sizes.get(key, 0.0) + nbytes

    def link(low: int, high: int) -> WirePrice:
        return links.get((low, high)) or links.get((high, low)) or WirePrice(0.0, float("inf"))

    pairs = {(min(pair), max(pair)) for pair in sizes}
    return {
        (low, high): EdgePrice(
            sizes.get((low, high), 0.0),
            link(low, high).bandwidth,
            link(low, high).latency,
            sizes.get((high, low), 0.0),
        )
        for low, high in sorted(pairs)
    }
