"""The price of a chunk for one microbatch, section by section, from the lines of its cost breakdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from autopar.cost.pipeline.prices import ChunkPrice
from autopar.ir.graph import Graph
from autopar.ir.plan_record import ONCE_A_STEP
from autopar.passes.lower.emit import IN_FLIGHT
from autopar.passes.pipeline.cut import split_backward
from autopar.placement.breakdown import CostBreakdown, CostLine
from autopar.placement.overlap_windows import HALVES, HiddenShares, Priced, SectionSeconds, seconds_of_sections
from autopar.placement.prices import BUCKET_BYTES, Prices
from autopar.search.schedules.chunks import Chunk

SECTIONS = ("forward", *HALVES)
SectionOf = Callable[[Priced], str]


def sections_of(graph: Graph) -> SectionOf:
    """Returns a function that gives the section of a chunk's graph that a line of its cost breakdown belongs to:
    "forward", "input_gradient" or "weight_gradient". A backward computation belongs to the input gradient if that needs
    it, a reshard if the input gradient has a node that reads the value."""
    early, _ = split_backward(graph)
    users: dict[str, set[str]] = {}
    for value, uses in graph.users.items():
        users.setdefault(value.node, set()).update(user.name for user, _ in uses)

    def is_early(line: Priced) -> bool:
        if line.kind in ("compute", "exchange"):
            return line.name in early
        return not users.get(line.name) or bool(users[line.name] & early)

    def section_of(line: Priced) -> str:
        if line.phase == "forward":
            return "forward"
        return "input_gradient" if is_early(line) else "weight_gradient"

    return section_of


def first_buckets_seconds(graph: Graph, lines: Iterable[CostLine]) -> float:
    """Seconds of the gradient buckets that fill first in backward, as many as may be in flight at once. A rank waits
    for an earlier bucket before it sends any other (:class:`autopar.passes.lower.emit.Buckets`)."""
    positions = {node.name: position for position, node in enumerate(graph.nodes)}
    reductions = [line for line in lines if line.kind == "gradient" and line.collectives]
    filling: dict[object, list[CostLine]] = {}
    full: list[list[CostLine]] = []
    for line in sorted(reductions, key=lambda line: positions[line.name]):
        wire = line.collectives[0]
        group = wire.kind, wire.axes, line.name if wire.kind == "all_to_all" else ""
        members = filling.setdefault(group, [])
        members.append(line)
        if sum(member.collectives[0].bytes for member in members) >= BUCKET_BYTES:
            full.append(filling.pop(group))
    return sum(line.seconds / len(line.collectives) for members in full[:IN_FLIGHT] for line in members)


def chunk_price(
    chunk: Chunk, breakdown: CostBreakdown, shares: HiddenShares, section_of: SectionOf, prices: Prices
) -> ChunkPrice:
    """The price of ``chunk`` on the devices of ``prices``, whose messages can be hidden in the given ``shares``."""
    seconds = Counter[str]()
    for line in breakdown.lines:
        if line.kind not in (*ONCE_A_STEP, "hidden"):
            seconds[section_of(line)] += line.seconds / line.times  # type: ignore[assignment]
    sides, memory = seconds_of_sections(breakdown.lines, section_of), breakdown.memory
    saved = sum(
        prices.held(n.type, chunk.assignment.strategies[n.name].outputs[0])
        for n in chunk.graph.nodes
        if n.op == "receive" or n.name in chunk.graph.kept - chunk.assignment.offloaded
    )
    return replace(
        price_of_sections(seconds, sides, shares, breakdown.seconds_of("gradient")),
        unawaited=shares.reductions * first_buckets_seconds(chunk.graph, breakdown.lines),
        until_weight_gradient=float(saved),
        static=float(memory.weights + memory.gradients + memory.optimizer + memory.inputs),
    )


def price_of_sections(
    seconds: Mapping[str, float], sides: Mapping[str, SectionSeconds], shares: HiddenShares, reduce: float
) -> ChunkPrice:
    """The price of a chunk whose sections take ``seconds`` each, and whose gradients take ``reduce`` seconds. Messages
    overlap what ``sides`` compute, in the given ``shares``."""
    forward, first, second = (sides.get(name, SectionSeconds()) for name in SECTIONS)
    taken = [seconds.get(name, 0.0) for name in SECTIONS]
    return ChunkPrice(
        taken[0] - shares.of_gathers(forward),
        taken[1] - shares.of_gathers(first),
        taken[2] - shares.of_gathers(second),
        backward=taken[1] + taken[2] - shares.of_gathers(first + second),
        reduce=reduce,
        overlap_weight_gradient=shares.of_reductions(second, reduce),
        overlap_backward=shares.of_reductions(first + second, reduce),
    )
