"""Counts live bytes, event by event as storages begin and end."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Life:
    """A storage of ``nbytes``, live from event ``born`` to event ``died`` (-1: still live)."""

    nbytes: int
    born: int
    died: int = -1
    watch: Any = field(default=None, repr=False)


class LiveBytes:
    """What meters of storages count. ``now``: bytes live; ``peak``: the most at once, reached at ``peak_event``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.events = self.peak_event = 0
        self._rises: list[tuple[int, int]] = []

    def begin(self, nbytes: int) -> Life:
        """Notes that a storage is live, and returns its record, to ask :meth:`at_peak` later."""
        self.events += 1
        self.now += nbytes
        self._rises.append((self.events, self.now))
        if self.now > self.peak:
            self.peak, self.peak_event = self.now, self.events
        return Life(nbytes, self.events)

    def end(self, life: Life) -> None:
        """Notes the end of a storage's life."""
        self.events += 1
        life.died = self.events
        self.now -= life.nbytes

    def peak_between(self, begin: int, end: int) -> int:
        """The most bytes live after any allocation from event ``begin`` to before event ``end``; 0 without one."""
        first, last = (bisect_left(self._rises, (event, 0)) for event in (begin, end))
        return max((held for _, held in self._rises[first:last]), default=0)

    def at_peak(self, life: Life | None) -> int:
        """Bytes of a storage if it was live at the peak, else 0."""
        if life is None or life.born > self.peak_event or 0 <= life.died <= self.peak_event:
            return 0
        return life.nbytes
