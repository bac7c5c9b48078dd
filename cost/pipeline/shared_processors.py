"""Ranks that share the processors of a host: the fewer of them compute, the quicker each is."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Host:
    """The computations under way on one host. While k of its ranks compute, each does ``speeds[k - 1]`` seconds of
    priced work in a second (processor sharing, Kleinrock 1967). A rank counts as ``devices[rank]`` ranks, if given."""

    def __init__(self, speeds: Sequence[float], devices: Sequence[int] = ()) -> None:
        self.speeds, self.devices = speeds, devices
        self._computing = 0
        # Priced seconds that an endless computation would have done up to ``_clock``.
        self._work, self._clock = 0.0, 0.0
        self._ends: list[tuple[float, int]] = []

    def _pass(self, time: float) -> None:
        if self._ends:
            self._work += (time - self._clock) * self._speed
        else:
            self._work = 0.0  # Sums stay short, and exact where nothing is shared.
        self._clock = time

    def begin(self, rank: int, seconds: float, time: float) -> None:
        """Starts a computation of ``rank`` that is priced at ``seconds``."""
        self._pass(time)
        heapq.heappush(self._ends, (self._work + seconds, rank))
        self._computing += self._count(rank)

    def next_end(self) -> float:
        """The time at which the next computation ends if no other begins; infinite if there is none."""
        if not self._ends:
            return float("inf")
        return self._clock + max(0.0, self._ends[0][0] - self._work) / self._speed

    def end(self, time: float) -> int:
        """Ends the computation that is due at ``time``. Returns its rank."""
        self._pass(time)
        self._work, rank = max(self._work, self._ends[0][0]), self._ends[0][1]
        heapq.heappop(self._ends)
        self._computing -= self._count(rank)
        return rank

    @property
    def _speed(self) -> float:
        return self.speeds[self._computing - 1]

    def _count(self, rank: int) -> int:
        return self.devices[rank] if self.devices else 1
