"""Schedules by list scheduling: a free rank starts at once the most urgent computation that is ready.

Input gradients are the most urgent, since other ranks wait for them. Forwards follow while memory lasts, and weight
gradients fill the remaining time, or the other way round. If a rank has several chunks, a forward leaves room for the
rank's later chunks, so that every microbatch that was begun can be finished.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count

from autopar.cost.pipeline.prices import PipelinePrices
from autopar.schedule.actions import Action, Kind
from autopar.schedule.dependencies import Wiring, prerequisites
from autopar.schedule.messages import Orders
from autopar.schedule.schedule import held_chunks

from .schedule_cpsat import Limits, travel_seconds, whole_bytes
from .schedule_size import SPLIT

_URGENCIES: tuple[tuple[Kind, ...], ...] = (
    ("input_gradient", "forward", "weight_gradient"),
    ("input_gradient", "weight_gradient", "forward"),
)


def greedy_orders(wiring: Wiring, microbatches: int, prices: PipelinePrices, limits: Limits) -> Iterator[Orders]:
    """Yields the computations of each rank, once for each order of urgency that completes the step within memory."""
    for urgency in _URGENCIES:
        scheduler = _Greedy(wiring, microbatches, prices, limits, urgency)
        if scheduler.run():
            yield tuple(map(tuple, scheduler.orders))


class _Greedy:
    """The event loop. A rank is woken when it becomes free and when a computation becomes ready for it."""

    def __init__(
        self, wiring: Wiring, microbatches: int, prices: PipelinePrices, limits: Limits, urgency: tuple[Kind, ...]
    ) -> None:
        self.wiring, self.prices, self.urgency = wiring, prices, urgency
        self.held = held_chunks(wiring.placement, max(wiring.placement) + 1)
        self.free = [0.0] * len(self.held)
        self.orders: list[list[Action]] = [[] for _ in self.held]
        self.ready: list[set[Action]] = [set() for _ in self.held]
        self.room = [
            math.inf if limits is None else limits[rank] - sum(prices.chunks[c].static for c in held)
            for rank, held in enumerate(self.held)
        ]
        chunks = range(len(wiring.placement))
        computations = [Action(kind, chunk, b) for kind in SPLIT for chunk in chunks for b in range(microbatches)]
        self.missing = {i: len(prerequisites(i)) + len(wiring.arrivals(i)) for i in computations}
        # (time, rank, serial number, computations for which one more input has arrived).
        self.serial = count()
        self.events: list[tuple[float, int, int, tuple[Action, ...]]] = []
        for rank in range(len(self.held)):
            self.wake(0.0, rank, ())
        for action, missing in self.missing.items():
            if not missing:
                self.ready[wiring.placement[action.chunk]].add(action)

    def wake(self, time: float, rank: int, arrived: tuple[Action, ...]) -> None:
        heapq.heappush(self.events, (time, rank, next(self.serial), arrived))

    def run(self) -> bool:
        """Runs all events. Returns whether everything was computed."""
        while self.events:
            time, rank, _, arrived = heapq.heappop(self.events)
            for action in arrived:
                self.missing[action] -= 1
                if not self.missing[action]:
                    self.ready[rank].add(action)
            more_at_once = self.events and self.events[0][:2] == (time, rank)
            if not more_at_once and self.free[rank] <= time:
                self.go(rank, time)
        return sum(map(len, self.orders)) == len(self.missing)

    def go(self, rank: int, time: float) -> None:
        """Starts the most urgent computation that is ready, if there is one."""
        allowed = [i for i in self.ready[rank] if i.kind != "forward" or self.needs(rank, i.chunk) <= self.room[rank]]
        if not allowed:
            return
        # Later chunks come first: their microbatches are finished sooner.
        chosen = min(allowed, key=lambda i: (self.urgency.index(i.kind), -i.chunk, i.microbatch))
        self.ready[rank].remove(chosen)
        self.orders[rank].append(chosen)
        self.free[rank] = time + self.prices.duration(chosen)
        self.keep(rank, chosen)
        self.wake(self.free[rank], rank, self.followers(chosen))
        for message in self.wiring.departures(chosen):
            kind: Kind = "forward" if message.direction == "forward" else "input_gradient"
            target = Action(kind, message.target, message.microbatch)
            arrival = self.free[rank] + travel_seconds(self.prices, self.wiring, message)
            self.wake(arrival, self.wiring.placement[message.target], (target,))

    def followers(self, done: Action) -> tuple[Action, ...]:
        """The computation that the same chunk can do next for the same microbatch, if there is one."""
        after = SPLIT[SPLIT.index(done.kind) + 1 :][:1]
        return tuple(Action(kind, done.chunk, done.microbatch) for kind in after)

    def needs(self, rank: int, chunk: int) -> float:
        """Bytes that must be free for a forward: those of its chunk, and one microbatch of each later chunk."""
        return sum(whole_bytes(self.prices, c) for c in self.held[rank] if c >= chunk)

    def keep(self, rank: int, done: Action) -> None:
        """Reserves the bytes of a forward, or releases those of a gradient. A rank chooses again only after the
        computation has ended, so releasing them at its start is safe."""
        price = self.prices.chunks[done.chunk]
        if done.kind == "forward":
            self.room[rank] -= whole_bytes(self.prices, done.chunk)
        elif done.kind == "input_gradient":
            self.room[rank] += price.until_input_gradient
        else:
            self.room[rank] += price.until_weight_gradient + price.between_gradients
