"""Completes lists of computations with sends, receives, reductions and the step.

The lists are replayed once with nominal durations, and every computation and message is recorded when it happens. A
message is recorded on both its ranks, right after the start of the computation that produces its value, so that a
receive is posted before the computation that it can overlap. Each rank's list is thus its part of *one* sequence in
which everything could happen one at a time. Of the actions not yet done, the first of that sequence can always proceed,
because both its ends have reached it. So nothing deadlocks, even if every send waits for its receive (rendezvous) and
nothing is batched. Two ranks see the messages between them in the same order, so tags are not needed. Buffered or
batched transports only wait less. An executor that waits in every receive, rather than where the value is used, would
idle while the value is computed; for such executors, ``prefetch=False`` puts messages where that computation ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count

from autopar.errors import ScheduleError

from .actions import Action, Edge, Message
from .dependencies import Wiring, prerequisites, receive_of, send_of
from .schedule import Schedule, check_chunks

Orders = tuple[tuple[Action, ...], ...]
Duration = Callable[[Action], float]


def nominal_duration(action: Action) -> float:
    """The duration of a computation if forward, input gradient and weight gradient take equally long."""
    return 2.0 if action.kind == "backward" else 1.0


class _Replay:
    """The event loop. A computation starts as soon as its rank is free and its inputs have arrived."""

    def __init__(self, orders: Orders, wiring: Wiring, duration: Duration, prefetch: bool) -> None:
        self.orders, self.wiring, self.duration, self.prefetch = orders, wiring, duration, prefetch
        self.position = [0] * len(orders)
        self.free = [0.0] * len(orders)
        self.arrived: dict[Message | Action, float] = {}
        self.waiting: dict[Message | Action, int] = {}
        # (time, computes, serial number, rank, or message and when it is ready): at equal times messages go first.
        self.events: list[tuple[float, bool, int, int | tuple[Message, float]]] = []
        self.serial = count()
        self.lists: list[list[Action]] = [[] for _ in orders]

    def needs(self, rank: int) -> tuple[Message | Action, ...]:
        action = self.orders[rank][self.position[rank]]
        return (*prerequisites(action), *self.wiring.arrivals(action))

    def queue_next(self, rank: int) -> None:
        """Queues the next computation of ``rank``, or notes what it waits for."""
        if self.position[rank] == len(self.orders[rank]):
            return
        needs = self.needs(rank)
        missing = next((need for need in needs if need not in self.arrived), None)
        if missing is None:
            start = max([self.free[rank], *(self.arrived[need] for need in needs)])
            heapq.heappush(self.events, (start, True, next(self.serial), rank))
        else:
            self.waiting[missing] = rank

    def arrive(self, arrival: Message | Action, time: float) -> None:
        self.arrived[arrival] = time
        if arrival in self.waiting:
            self.queue_next(self.waiting.pop(arrival))

    def compute(self, rank: int, start: float) -> None:
        action = self.orders[rank][self.position[rank]]
        end = start + self.duration(action)
        self.lists[rank].append(action)
        self.free[rank] = end
        self.position[rank] += 1
        self.arrived[action] = end
        for message in self.wiring.departures(action):
            if self.wiring.crosses(message):
                heapq.heappush(self.events, (start if self.prefetch else end, False, next(self.serial), (message, end)))
            else:
                self.arrived[message] = end
        self.queue_next(rank)

    def move(self, message: Message, ready: float) -> None:
        self.lists[self.wiring.placement[message.source]].append(send_of(message))
        self.lists[self.wiring.placement[message.target]].append(receive_of(message))
        self.arrive(message, ready)

    def run(self) -> None:
        for rank in range(len(self.orders)):
            self.queue_next(rank)
        while self.events:
            time, _, _, event = heapq.heappop(self.events)
            if isinstance(event, int):
                self.compute(event, time)
            else:
                self.move(*event)

    def stuck(self) -> list[str]:
        """For each rank that did not reach the end of its list, what it waits for."""
        return [
            f"rank {rank} cannot compute {self.orders[rank][at]} (position {at}): "
            + ", ".join(
                f"no {send_of(need) if isinstance(need, Message) else need}"
                for need in self.needs(rank)
                if need not in self.arrived
            )
            for rank, at in enumerate(self.position)
            if at < len(self.orders[rank])
        ]


def insert_messages(
    orders: Orders, wiring: Wiring, duration: Duration = nominal_duration, prefetch: bool = True
) -> Orders:
    """Computations per rank, with the sends and receives of every edge between ranks.

    ``duration``: seconds (or any unit, not negative) of a computation; it only decides the positions of messages.
    ``prefetch``: whether receives are posted when the computation of their values starts, or when it ends. Raises
    :class:`ScheduleError` if computations wait for each other in a cycle, or for one that is on no list.
    """
    replay = _Replay(orders, wiring, duration, prefetch)
    replay.run()
    if stuck := replay.stuck():
        raise ScheduleError(
            "these computations wait for each other, or for a value that no rank computes:\n" + "\n".join(stuck)
        )
    return tuple(map(tuple, replay.lists))


def _finish(listed: tuple[Action, ...]) -> tuple[Action, ...]:
    """Reduces each chunk before the first computation that follows its last backward, and ends with the step."""
    last = {i.chunk: at for at, i in enumerate(listed) if i.kind in ("weight_gradient", "backward")}
    due = {at: chunk for chunk, at in last.items()}
    finished: list[Action] = []
    pending: list[Action] = []
    for at, action in enumerate(listed):
        if action.computes:
            finished += pending
            pending = []
        finished.append(action)
        if at in due:
            pending.append(Action("reduce", due[at]))
    return (*finished, *pending, Action("step"))


def complete(
    name: str,
    orders: Orders,
    placement: tuple[int, ...],
    edges: tuple[Edge, ...],
    in_flight: tuple[int, ...] | None = None,
    duration: Duration = nominal_duration,
    prefetch: bool = True,
) -> Schedule:
    """The training schedule of the computations in ``orders``: messages, reductions and the step are added.

    ``in_flight``: the numbers to promise; by default the most that the lists hold. Raises :class:`ScheduleError`.
    """
    check_chunks(placement, edges, 1)
    microbatches = 1 + max((i.microbatch for listed in orders for i in listed), default=-1)
    ranks = tuple(map(_finish, insert_messages(orders, Wiring(placement, edges), duration, prefetch)))
    promised = in_flight or tuple(map(most_in_flight, ranks))
    return Schedule(name, microbatches, placement, edges, ranks, promised)


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule for evaluation with the same chunks and microbatches: the forwards in their order, with their
    messages."""
    orders = tuple(tuple(i for i in listed if i.kind == "forward") for listed in schedule.ranks)
    ranks = insert_messages(orders, Wiring.of(schedule))
    in_flight = (0,) * schedule.stages
    name = f"{schedule.name}-forward"
    return Schedule(name, schedule.microbatches, schedule.placement, schedule.edges, ranks, in_flight, training=False)


def most_in_flight(listed: Iterable[Action]) -> int:
    """The most (chunk, microbatch) pairs at any position that began forward and did not finish backward."""
    in_flight = most = 0
    for action in listed:
        in_flight += action.kind == "forward"
        most = max(most, in_flight)
        in_flight -= action.kind in ("weight_gradient", "backward")
    return most


def most_in_flight_of_chunks(orders: Iterable[Iterable[Action]], chunks: int) -> tuple[int, ...]:
    """For each chunk, the most microbatches that have begun forward there and not ended backward; at least one."""
    listed: list[list[Action]] = [[] for _ in range(chunks)]
    for order in orders:
        for action in order:
            if action.chunk >= 0:
                listed[action.chunk].append(action)
    return tuple(max(1, most_in_flight(actions)) for actions in listed)
