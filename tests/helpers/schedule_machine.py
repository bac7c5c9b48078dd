"""An interpreter of schedules, for tests: it knows nothing of the checker.

Ranks run their lists as threads of control under a random interleaving. Messages are untagged queues between ranks; a
receive waits where it stands if messages block, else where its value is used.
A value says what it is and for which chunk, so one that is wrong, late or missing shows where it is used.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

from autopar.schedule.actions import Action
from autopar.schedule.schedule import Schedule

Queues = dict[tuple[int, int], deque[Any]]


class Broken(Exception):
    """The list did something a real run would fail at, or get wrong."""


class Machine:
    def __init__(self, schedule: Schedule, seed: int, blocking: bool) -> None:
        self.schedule, self.blocking = schedule, blocking
        self.random = random.Random(seed)
        self.position = [0] * schedule.stages
        self.offered: Queues = defaultdict(deque)  # sent, not yet received
        self.posted: Queues = defaultdict(deque)  # where what is not yet sent belongs
        self.stores: list[dict[Any, Any]] = [{} for _ in range(schedule.stages)]
        self.weights: dict[int, list[int]] = defaultdict(list)
        self.reduced: dict[int, int] = {}
        self.flying: list[set[Any]] = [set() for _ in range(schedule.stages)]
        self.stepped: list[int] = []

    def run(self) -> None:
        """Raises :class:`Broken` unless the step comes out right."""
        live = [rank for rank in range(self.schedule.stages) if self.schedule.ranks[rank]]
        while live:
            moved = False
            self.random.shuffle(live)
            for rank in list(live):
                moved |= self.turn(rank)
                if self.position[rank] == len(self.schedule.ranks[rank]):
                    live.remove(rank)
            if not moved:
                raise Broken("deadlock")
        self.examine()

    def turn(self, rank: int) -> bool:
        action = self.schedule.ranks[rank][self.position[rank]]
        if rank in self.stepped:
            raise Broken("goes on after the step")
        if action.receives and not self.receive(rank, action):
            return False
        if action.sends and not self.send(rank, action):
            return False
        if not action.receives and not action.sends:
            if self.waits(rank, action):
                return False
            self.compute(rank, action)
        self.position[rank] += 1
        return True

    def ends(self, action: Action) -> tuple[int, int]:
        peer = action.peer
        if not 0 <= peer < self.schedule.chunks or not 0 <= action.chunk < self.schedule.chunks:
            raise Broken("no such chunk")
        mine, other = self.schedule.placement[action.chunk], self.schedule.placement[peer]
        if mine == other:
            raise Broken("sends to itself")
        return (mine, other) if action.sends else (other, mine)

    def receive(self, rank: int, action: Action) -> bool:
        if self.ends(action)[1] != rank:
            raise Broken("receives for another rank")
        ends = self.ends(action)
        if self.blocking and not self.offered[ends]:
            return False
        letter = "F" if action.kind == "receive_forward" else "G"
        key = ("from", letter, action.peer, action.chunk, action.microbatch)
        if key in self.stores[rank] or key in self.posted[ends]:
            raise Broken("received twice")
        self.posted[ends].append(key)
        self.deliver(ends)
        return True

    def deliver(self, ends: tuple[int, int]) -> None:
        while self.offered[ends] and self.posted[ends]:
            self.stores[ends[1]][self.posted[ends].popleft()] = self.offered[ends].popleft()

    def waits(self, rank: int, action: Action) -> bool:
        """Whether what is computed takes a value that is on its way."""
        letter = {"forward": "F", "input_gradient": "G", "backward": "G"}.get(action.kind)
        keys = (key for ends, posted in self.posted.items() if ends[1] == rank for key in posted)
        return any((key[1], *key[3:]) == (letter, action.chunk, action.microbatch) for key in keys)

    def send(self, rank: int, action: Action) -> bool:
        """Rendezvous: the receiver must stand at a receive from here before the sender goes on."""
        ends = self.ends(action)
        if ends[0] != rank:
            raise Broken("sends for another rank")
        letter = "F" if action.kind == "send_forward" else "G"
        value = self.stores[rank].get((letter, action.chunk, action.microbatch))
        if value is None:
            raise Broken("sends what is not there")
        if self.blocking:
            there, at = self.schedule.ranks[ends[1]], self.position[ends[1]]
            if at >= len(there) or not there[at].receives or self.ends(there[at]) != ends or self.offered[ends]:
                return False
        self.offered[ends].append((*value, "for", action.peer))
        self.deliver(ends)
        return True

    def take(self, rank: int, letter: str, source: int, chunk: int, microbatch: int) -> None:
        """The value of ``source`` for ``chunk`` must be here, and be the right one."""
        if self.schedule.placement[source] == rank:
            found = self.stores[rank].get((letter, source, microbatch))
            right = found == (letter, source, microbatch)
        else:
            found = self.stores[rank].get(("from", letter, source, chunk, microbatch))
            right = found == (letter, source, microbatch, "for", chunk)
        if not right:
            raise Broken(f"{letter} of {source} for {chunk}: {found}")

    def compute(self, rank: int, action: Action) -> None:
        chunk, microbatch = action.chunk, action.microbatch
        store = self.stores[rank]
        if action.kind == "step":
            self.stepped.append(rank)
            if any(self.reduced.get(c) != self.schedule.microbatches for c in self.schedule.held[rank]):
                raise Broken("steps with gradients that are not reduced")
            return
        if chunk not in self.schedule.held[rank]:
            raise Broken("computes on the wrong rank")
        if action.kind == "reduce":
            if chunk in self.reduced:
                raise Broken("reduced twice")
            self.reduced[chunk] = len(self.weights[chunk])
            return
        if not 0 <= microbatch < self.schedule.microbatches:
            raise Broken("no such microbatch")
        if action.kind == "forward":
            for source, target, _ in self.schedule.edges:
                if target == chunk:
                    self.take(rank, "F", source, chunk, microbatch)
            self.store(rank, ("F", chunk, microbatch))
            self.flying[rank].add((chunk, microbatch))
            if len(self.flying[rank]) > self.schedule.in_flight[rank]:
                raise Broken("too many in flight")
        if action.kind in ("input_gradient", "backward"):
            if ("F", chunk, microbatch) not in store:
                raise Broken("backward before forward")
            for source, target, gradient in self.schedule.edges:
                if source == chunk and gradient:
                    self.take(rank, "G", target, chunk, microbatch)
            self.store(rank, ("G", chunk, microbatch))
        if action.kind in ("weight_gradient", "backward"):
            if ("G", chunk, microbatch) not in store or microbatch in self.weights[chunk]:
                raise Broken("weight gradient too early or twice")
            self.weights[chunk].append(microbatch)
            self.flying[rank].discard((chunk, microbatch))

    def store(self, rank: int, key: Any) -> None:
        if key in self.stores[rank]:
            raise Broken("computed twice")
        self.stores[rank][key] = key

    def examine(self) -> None:
        if sorted(self.stepped) != list(range(self.schedule.stages)):
            raise Broken("a rank did not step, or stepped twice")
        if any(len(self.weights[c]) != self.schedule.microbatches for c in range(self.schedule.chunks)):
            raise Broken("gradients are missing")
        if any(self.offered.values()) or any(self.posted.values()):
            raise Broken("messages are left over")
