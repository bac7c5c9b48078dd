"""Proves for any schedule that it runs to its end and computes the intended step.

The following is proven, in this order; the first property that fails is reported:

1. every action names a chunk of its rank, a microbatch of the step and an edge between ranks;
2. every forward, every backward (whole, or both halves), every send and receive of every edge, every reduction and
   every rank's step is listed exactly once;
3. on each rank, forward comes before the input gradient and that before the weight gradient; nothing is computed
   before what it uses was received, or computed on the same rank; nothing is sent before it is computed; a chunk is
   reduced after its last weight gradient, and the step comes last;
4. from any rank to any other, messages are received in the order in which they are sent;
5. no deadlock: the lists are replayed under the rules of ``communication``;
6. no rank holds more in flight than it promised.

Given 1 to 3, each rank would compute the right values if all messages arrived. By 4 the right messages arrive, and by 5
all of them do. The proof does not depend on durations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from autopar.errors import ScheduleError

from .actions import Action, Message
from .dependencies import Wiring, prerequisites, producers, receive_of, send_of
from .schedule import Schedule

Communication = Literal["asynchronous", "batched", "blocking"]
Where = dict[Action, tuple[int, int]]
# How many faults a message names. Chosen: as many as a reader takes in.
_SHOWN = 5


def check(schedule: Schedule, communication: Communication = "batched") -> None:
    """Raises :class:`ScheduleError`, naming rank, position and action, unless ``schedule`` is proven correct.

    ``communication`` says when an action lets its rank continue. ``"asynchronous"``: sends and receives at once, and
    a computation when its values have been sent (buffered ``isend``). ``"batched"``: adjacent sends and receives are
    posted together and complete when the other end of each is posted (``batch_isend_irecv`` without buffers).
    ``"blocking"``: each send and receive by itself. A list that passes a stricter rule passes the rules before it.
    """
    wiring = Wiring.of(schedule)
    _report(schedule, _invalid_actions(schedule, wiring))
    _report(schedule, _miscounts(schedule, wiring))
    where = {action: (rank, at) for rank, at, action in schedule.actions()}
    _report(schedule, _disorder(schedule, wiring, where))
    _report(schedule, _mismatches(schedule, wiring))
    _report(schedule, _Replay(schedule, wiring, communication).deadlock())
    _report(schedule, _overflow(schedule))


def _report(schedule: Schedule, findings: Iterator[str]) -> None:
    faults = list(findings)
    if faults:
        shown = faults[:_SHOWN] + ([f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else [])
        raise ScheduleError(f"schedule {schedule.name!r} cannot run:\n  " + "\n  ".join(shown))


def _at(rank: int, position: int, action: Action) -> str:
    return f"rank {rank}, position {position}, {action}"


def _invalid_actions(schedule: Schedule, wiring: Wiring) -> Iterator[str]:
    for rank, at, action in schedule.actions():
        if fault := _fault_of(schedule, wiring, rank, action):
            yield f"{_at(rank, at, action)}: {fault}"


def _fault_of(schedule: Schedule, wiring: Wiring, rank: int, action: Action) -> str | None:
    """Why ``action`` is invalid on ``rank`` of the schedule; None if it is valid."""
    if action.kind == "step":
        return None if action == Action("step") else "a step names no chunk, microbatch or peer"
    if action.chunk not in schedule.held[rank]:
        return f"rank {rank} holds chunks {schedule.held[rank]}, not {action.chunk}"
    if action.kind == "reduce":
        return None if action.microbatch == action.peer == -1 else "a chunk is reduced once for all microbatches"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"there are microbatches 0 to {schedule.microbatches - 1}"
    if action.computes:
        return None if action.peer == -1 else "a computation has no peer"
    return _fault_of_message(schedule, wiring, action.message)


def _fault_of_message(schedule: Schedule, wiring: Wiring, message: Message) -> str | None:
    edges = {edge[:2]: edge.gradient for edge in schedule.edges}
    ends = (message.source, message.target)
    if ends not in edges if message.direction == "forward" else not edges.get(ends[::-1], False):
        return (
            f"no edge carries a {'value' if message.direction == 'forward' else 'gradient'} from {ends[0]} to {ends[1]}"
        )
    if not wiring.crosses(message):
        return f"chunks {ends[0]} and {ends[1]} are on one rank, where values are passed without a message"
    return None


def _expected(schedule: Schedule, wiring: Wiring) -> Iterator[Action]:
    """All actions that must be listed once. A backward may also be listed as its two halves."""
    for chunk in range(schedule.chunks):
        for microbatch in range(schedule.microbatches):
            yield from _expected_of(Action("forward", chunk, microbatch), wiring)
            if schedule.training:
                yield from _expected_of(Action("backward", chunk, microbatch), wiring)
        if schedule.training:
            yield Action("reduce", chunk)


def _expected_of(computation: Action, wiring: Wiring) -> Iterator[Action]:
    yield computation
    yield from (receive_of(message) for message in wiring.arrivals(computation) if wiring.crosses(message))
    yield from (send_of(message) for message in wiring.departures(computation) if wiring.crosses(message))


def _halves(action: Action) -> tuple[Action, Action]:
    chunk, microbatch = action.chunk, action.microbatch
    return Action("input_gradient", chunk, microbatch), Action("weight_gradient", chunk, microbatch)


def _miscounts(schedule: Schedule, wiring: Wiring) -> Iterator[str]:
    """Actions that are listed twice, that should not be listed, or that are missing."""
    seen: set[tuple[int, Action]] = set()
    for rank, at, action in schedule.actions():
        if (rank, action) in seen:
            yield f"{_at(rank, at, action)}: is on this list a second time"
        seen.add((rank, action))
        if not schedule.training and (action.kind in _BACKWARD or action.kind.endswith("backward")):
            yield f"{_at(rank, at, action)}: the schedule only goes forward"
    for action in _expected(schedule, wiring):
        rank = schedule.placement[action.chunk]
        missing = [action] if (rank, action) not in seen else []
        if action.kind == "backward":
            halves = [half for half in _halves(action) if (rank, half) in seen]
            if halves and not missing:
                yield f"rank {rank}: {action} is listed whole, and {halves[0]} a second time"
            missing = [half for half in _halves(action) if half not in halves] if halves else missing
        for absent in missing:
            yield f"rank {rank}: {absent} is missing"
    for rank in range(schedule.stages if schedule.training else 0):
        if (rank, Action("step")) not in seen:
            yield f"rank {rank}: step is missing"


_BACKWARD = ("input_gradient", "weight_gradient", "reduce", "step")


def _disorder(schedule: Schedule, wiring: Wiring, where: Where) -> Iterator[str]:
    """Actions that are listed before an action of their own rank that they need."""
    for rank, at, action in schedule.actions():
        for needed in _needed(schedule, wiring, action):
            if needed in where and where[needed][1] > at:
                later = f"{needed} (position {where[needed][1]})"
                yield f"{_at(rank, at, action)}: comes before {later}, which it needs"
        if action.kind == "step" and at < len(schedule.ranks[rank]) - 1:
            yield f"{_at(rank, at, action)}: the step comes last, {schedule.ranks[rank][at + 1]} follows it"


def _needed(schedule: Schedule, wiring: Wiring, action: Action) -> Iterator[Action]:
    """The actions of the same rank that must come before ``action``. Both forms of a backward are included; only one of
    them is listed."""
    if action.sends:
        yield from producers(action.message)
    elif action.kind == "reduce":
        for microbatch in range(schedule.microbatches):
            yield Action("backward", action.chunk, microbatch)
            yield Action("weight_gradient", action.chunk, microbatch)
    elif action.computes:
        yield from prerequisites(action)
        for message in wiring.arrivals(action):
            yield from (receive_of(message),) if wiring.crosses(message) else producers(message)


def _mismatches(schedule: Schedule, wiring: Wiring) -> Iterator[str]:
    """The first messages in whose order two ranks disagree, for each pair of sender and receiver."""
    sent: dict[tuple[int, int], list[tuple[int, int, Action]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, int, Action]]] = defaultdict(list)
    for entry in schedule.actions():
        if entry[2].sends or entry[2].receives:
            message = entry[2].message
            ends = schedule.placement[message.source], schedule.placement[message.target]
            (sent if entry[2].sends else received)[ends].append(entry)
    for ends in sent:
        for send, receive in zip(sent[ends], received[ends], strict=True):
            if send[2].message != receive[2].message:
                yield f"{_at(*receive)}: would receive what {_at(*send)} sends; both must keep one order"
                break


class _Replay:
    """Replays the lists until no rank can continue."""

    def __init__(self, schedule: Schedule, wiring: Wiring, communication: Communication) -> None:
        self.schedule, self.wiring, self.communication = schedule, wiring, communication
        self.position = [0] * schedule.stages
        self.posted: set[Action] = set()

    def deadlock(self) -> Iterator[str]:
        """For each rank that does not reach the end of its list, what it waits for."""
        moved = True
        while moved:
            moved = any([self._advance(rank) for rank in range(self.schedule.stages)])  # noqa: C419 (each must move)
        for rank, listed in enumerate(self.schedule.ranks):
            if self.position[rank] < len(listed):
                yield self._stuck(rank)

    def _advance(self, rank: int) -> bool:
        """Advances ``rank`` as far as possible. Returns whether it advanced or posted anything."""
        listed, before = self.schedule.ranks[rank], (self.position[rank], len(self.posted))
        while self.position[rank] < len(listed):
            batch = self._batch(rank)
            self.posted.update(batch)
            if any(other not in self.posted for other in self._awaited(batch)):
                break
            self.position[rank] += len(batch)
        return (self.position[rank], len(self.posted)) != before

    def _batch(self, rank: int) -> tuple[Action, ...]:
        """The actions at the position of ``rank`` that complete together."""
        listed, start = self.schedule.ranks[rank], self.position[rank]
        end = start + 1
        if self.communication == "batched" and (listed[start].sends or listed[start].receives):
            while end < len(listed) and (listed[end].sends or listed[end].receives):
                end += 1
        return listed[start:end]

    def _awaited(self, batch: tuple[Action, ...]) -> Iterator[Action]:
        """The actions of other ranks for which ``batch`` waits."""
        for action in batch:
            if self.communication == "asynchronous":
                arrivals = self.wiring.arrivals(action) if action.computes else ()
                yield from (send_of(message) for message in arrivals if self.wiring.crosses(message))
            elif action.sends or action.receives:
                message = action.message
                yield receive_of(message) if action.sends else send_of(message)

    def _stuck(self, rank: int) -> str:
        batch = self._batch(rank)
        awaited = next(action for action in self._awaited(batch) if action not in self.posted)
        other = self.schedule.placement[awaited.chunk]
        position = self.position[other]
        there = _at(other, position, self.schedule.ranks[other][position])
        return f"{_at(rank, self.position[rank], batch[0])}: waits for {awaited}, while the other end is at {there}"


def _overflow(schedule: Schedule) -> Iterator[str]:
    """For each rank that holds more than it promised, the first action after which it does."""
    if not schedule.training:
        return
    in_flight = [0] * schedule.stages
    reported: set[int] = set()
    for rank, at, action in schedule.actions():
        in_flight[rank] += action.kind == "forward"
        if in_flight[rank] > schedule.in_flight[rank] and rank not in reported:
            reported.add(rank)
            promised = f"{in_flight[rank]} in flight, {schedule.in_flight[rank]} promised"
            yield f"{_at(rank, at, action)}: {promised}; finish a backward first, or promise more"
        in_flight[rank] -= action.kind in ("weight_gradient", "backward")
