"""Closed forms for pipelines: seconds that no schedule can beat, and bubbles of the named schedules with equal
chunks."""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.schedule.actions import Edge
from autopar.schedule.dependencies import Wiring

from .prices import ChunkPrice, PipelinePrices


def step_lower_bound(
    prices: PipelinePrices, placement: tuple[int, ...], edges: tuple[Edge, ...], microbatches: int, split: bool = True
) -> float:
    """Seconds that no schedule of these chunks can beat; used to prune before anything is simulated.

    It is the largest of two kinds of sums. For each rank: its earliest start (the shortest path of a first value to one
    of its chunks), all its work, and the shortest path from its last computation to the end of the step. For one
    microbatch: its path through all chunks and back. ``split``: whether backward may be split; a rank may then end with
    a weight gradient, for which no rank waits.
    """
    wiring = Wiring(placement, edges)
    heads = _forward_heads(prices, wiring)
    tails = _backward_tails(prices, wiring, split)
    bound = 0.0
    for rank in set(placement):
        held = [chunk for chunk, at in enumerate(placement) if at == rank]
        work = microbatches * sum(_work(prices.chunks[chunk], split) for chunk in held)
        begin = min(heads[chunk] - _forward(prices.chunks[chunk]) for chunk in held)
        end = 0.0 if split else min(tails[chunk] for chunk in held)
        bound = max(bound, begin + work + end)
    around = max(heads[chunk] + _back(prices.chunks[chunk], split) + tails[chunk] for chunk in range(len(placement)))
    return max(bound, around) + prices.step


def _forward(price: ChunkPrice) -> float:
    """Seconds of a forward without receiving, which may happen while the rank waits. The functions below leave it out
    too."""
    return price.forward - price.receive_forward


def _work(price: ChunkPrice, split: bool) -> float:
    both = price.input_gradient + price.weight_gradient
    backward = min(both, price.whole_backward) if split else price.whole_backward
    return _forward(price) + backward - price.receive_backward


def _back(price: ChunkPrice, split: bool) -> float:
    shortest = min(price.input_gradient, price.whole_backward) if split else price.whole_backward
    return shortest - price.receive_backward


def _forward_heads(prices: PipelinePrices, wiring: Wiring) -> list[float]:
    """For each chunk, the earliest end of its first forward."""
    heads: list[float] = []
    for chunk, price in enumerate(prices.chunks):
        arrivals = (heads[s] + _transfer(prices, wiring, s, chunk, "forward") for s in wiring.values_from[chunk])
        heads.append(max(arrivals, default=0.0) + _forward(price))
    return heads


def _backward_tails(prices: PipelinePrices, wiring: Wiring, split: bool) -> list[float]:
    """For each chunk, the least seconds from the end of one of its backwards to the end of the step."""
    tails: list[float] = []
    for chunk in range(len(prices.chunks)):
        onward = (
            _transfer(prices, wiring, source, chunk, "backward") + _back(prices.chunks[source], split) + tails[source]
            for source in wiring.gradients_to[chunk]
        )
        tails.append(max(onward, default=0.0))
    return tails


def _transfer(prices: PipelinePrices, wiring: Wiring, source: int, target: int, direction: str) -> float:
    price = prices.edges.get((source, target))
    if price is None or wiring.placement[source] == wiring.placement[target]:
        return 0.0
    return price.bytes_of(direction) / price.bandwidth + price.latency


def bubble_fraction(name: str, stages: int, microbatches: int, chunks: int = 1) -> float:
    """The ratio of idle to busy time with equal chunks and free messages, as published: (p - 1)/m for GPipe with one
    chunk and for 1F1B; (p - 1)/(m v) for interleaved 1F1B with m >= p (Narayanan et al. 2021, for multiples of p). If
    forward, input gradient and weight gradient take equally long, (p - 1)/(3 m) for ZB-H1 with m >= p (Qi et al. 2023)
    and (p - 1)/(6 m) for ZB-V with m >= 2 p (Qi et al. 2024). Raises :class:`ScheduleError` for other schedules.

    At a fixed global batch, larger microbatches mean fewer of them, so the bubble grows.
    """
    if name in ("gpipe", "1f1b") and chunks == 1:
        return (stages - 1) / microbatches
    if name == "interleaved" and microbatches >= stages:
        return (stages - 1) / (microbatches * chunks)
    if name == "zb-h1" and microbatches >= stages:
        return (stages - 1) / (3 * microbatches)
    if name == "zb-v" and microbatches >= 2 * stages:
        return (stages - 1) / (6 * microbatches)
    raise ScheduleError(
        f"no closed form for {name!r} with {stages} stages, {microbatches} microbatches, {chunks} chunks"
    )
