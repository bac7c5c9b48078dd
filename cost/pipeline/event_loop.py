"""The event loop behind :func:`autopar.cost.pipeline.simulate.simulate`."""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import count

from autopar.errors import ScheduleError
from autopar.schedule.actions import Action, Message
from autopar.schedule.dependencies import Wiring
from autopar.schedule.schedule import Schedule

from .prices import EdgePrice, PipelinePrices
from .record import Ran, SentMessage
from .shared_processors import Host

_FREE = EdgePrice()


class Replay:
    """Replays a schedule. Ranks run their actions in the order of time. Events are the end of a computation, the
    arrival of a message, and the end of a wait."""

    def __init__(self, schedule: Schedule, prices: PipelinePrices) -> None:
        self.schedule, self.prices, self.wiring = schedule, prices, Wiring.of(schedule)
        stages = schedule.stages
        self.now = 0.0
        self.position = [0] * stages
        self.reduced = [0.0] * stages
        self.begun = [0.0] * stages
        # For each rank that waits for operands of its next computation, the start of the wait.
        self.idle: dict[int, float] = {}
        # For each chunk, the last action that computed its weight gradients.
        self.last: dict[int, Action] = {}
        self.sent: set[Message] = set()
        self.posted: dict[Message, float] = {}
        self.arrived: set[Message] = set()
        self.waiting: dict[Message, list[int]] = defaultdict(list)
        self.link_free: dict[object, float] = defaultdict(float)
        self.done: list[Ran] = []
        self.messages: list[SentMessage] = []
        shared = prices.shared
        self.host_of = range(stages) if shared is None else shared.hosts
        speeds, devices = ((1.0,), ()) if shared is None else (shared.speeds, shared.devices)
        self.hosts = [Host(speeds, devices) for _ in range(max(self.host_of) + 1)]
        # The version of each host's announced end. Events of older versions are ignored.
        self.versions = [0] * len(self.hosts)
        self.order = count()
        self.events: list[tuple[float, int, str, object]] = []

    def run(self) -> None:
        for rank in range(self.schedule.stages):
            self.advance(rank)
        while self.events:
            self.now, _, kind, subject = heapq.heappop(self.events)
            if kind == "arrives":
                assert isinstance(subject, Message)
                self.arrived.add(subject)
                for rank in self.waiting.pop(subject, ()):
                    self.advance(rank)
            elif kind == "resumes":
                assert isinstance(subject, int)
                self.advance(subject)
            else:
                self.computed(*subject)  # type: ignore[misc]
        for rank, listed in enumerate(self.schedule.ranks):
            if self.position[rank] < len(listed):
                at = self.position[rank]
                raise ScheduleError(
                    f"rank {rank} never gets past position {at}, {listed[at]}: check the schedule first"
                )

    def at(self, time: float, kind: str, subject: object) -> None:
        heapq.heappush(self.events, (time, next(self.order), kind, subject))

    def advance(self, rank: int) -> None:
        """Advances through the list of ``rank`` until it computes or waits."""
        listed = self.schedule.ranks[rank]
        while self.position[rank] < len(listed):
            action = listed[self.position[rank]]
            if action.peer >= 0:
                if not self.communicate(rank):
                    return
            elif action.computes or action.chunk < 0:
                if self.ready(rank, action):
                    self.begin(rank, action)
                return
            elif not self.reduce(rank, action):
                return
            self.position[rank] += 1

    def ready(self, rank: int, action: Action) -> bool:
        """Whether a computation has its values, or the step its gradients. If not, ``rank`` waits for one of them."""
        if action.chunk < 0:
            if self.reduced[rank] > self.now:
                self.at(self.reduced[rank], "resumes", rank)
                return False
            return True
        for message in self.wiring.arrivals(action):
            if self.wiring.crosses(message) and message not in self.arrived:
                self.waiting[message].append(rank)
                self.idle.setdefault(rank, self.now)
                return False
        return True

    def begin(self, rank: int, action: Action) -> None:
        self.begun[rank] = self.now
        waited = self.now - self.idle.pop(rank, self.now)
        seconds = self.prices.step
        if action.chunk >= 0:
            seconds = self.prices.duration(action, waited) + self.handling(action)
        host = self.host_of[rank]
        self.hosts[host].begin(rank, seconds, self.now)
        self.expect(host)

    def handling(self, action: Action) -> float:
        """Seconds that a rank itself spends on the messages before and after a computation, if its processors move the
        bytes: half of each message's seconds, since rates were measured with processes that send and receive at
        once."""
        if self.prices.hides:
            return 0.0
        messages = (*self.wiring.arrivals(action), *self.wiring.departures(action))
        return sum(0.5 * self.price_of(m).seconds(m.direction) for m in messages if self.wiring.crosses(m))

    def price_of(self, message: Message) -> EdgePrice:
        source, target = message.source, message.target
        edge = (source, target) if message.direction == "forward" else (target, source)
        return self.prices.edges.get(edge, _FREE)

    def expect(self, host: int) -> None:
        """Announces the next end of a computation on ``host``."""
        self.versions[host] += 1
        time = self.hosts[host].next_end()
        if time < float("inf"):
            self.at(time, "computed", (host, self.versions[host]))

    def computed(self, host: int, version: int) -> None:
        if version != self.versions[host]:
            return
        rank = self.hosts[host].end(self.now)
        self.expect(host)
        action = self.schedule.ranks[rank][self.position[rank]]
        self.done.append(Ran(rank, action, self.begun[rank], self.now))
        if action.kind in ("backward", "weight_gradient"):
            self.last[action.chunk] = action
        self.position[rank] += 1
        self.advance(rank)

    def reduce(self, rank: int, action: Action) -> bool:
        """Starts a reduction. A part of it overlapped the computation before it, unless another reduction was under
        way. If reductions cannot overlap computation, ``rank`` waits until it is done. Returns whether the rank
        continues."""
        last, overlapped = self.last.get(action.chunk), 0.0
        if last is not None:
            overlapped = self.prices.overlapped_reduction(last, self.schedule.ends_with(action.chunk))
        start = max(self.now - overlapped, self.reduced[rank])
        end = self.reduced[rank] = start + self.prices.chunks[action.chunk].reduce
        self.done.append(Ran(rank, action, start, end))
        if self.prices.overlaps_reductions:
            return True
        self.position[rank] += 1
        self.at(end, "resumes", rank)
        return False

    def communicate(self, rank: int) -> bool:
        """Posts the next message. Without overlap, posts all adjacent messages and waits for them. Returns whether the
        rank continues."""
        listed, start = self.schedule.ranks[rank], self.position[rank]
        if self.prices.overlap:
            self.post(listed[start])
            return True
        end = next((k for k in range(start, len(listed)) if listed[k].peer < 0), len(listed))
        for action in listed[start:end]:
            self.post(action)
        missing = next((i.message for i in listed[start:end] if i.message not in self.arrived), None)
        if missing is not None:
            self.waiting[missing].append(rank)
            return False
        self.position[rank] = end - 1
        return True

    def post(self, action: Action) -> None:
        """Notes one end of a message. It is sent once both ends are posted (if transports are buffered, once its send
        is)."""
        message = action.message
        if action.receives:
            if message in self.posted:
                return
            self.posted[message] = self.now
            if not self.prices.buffered and message in self.sent:
                self.send(message)
        elif message not in self.sent:
            self.sent.add(message)
            if self.prices.buffered or message in self.posted:
                self.send(message)

    def send(self, message: Message) -> None:
        ends = self.wiring.placement[message.source], self.wiring.placement[message.target]
        price = self.price_of(message)
        link = self.prices.links.get(ends, ends)
        start = max(self.now, self.link_free[link])
        self.link_free[link] = start + price.bytes_of(message.direction) / price.bandwidth
        arrival = self.link_free[link] + price.latency
        self.at(arrival, "arrives", message)
        self.messages.append(SentMessage(message, self.posted.get(message, start), start, arrival))
