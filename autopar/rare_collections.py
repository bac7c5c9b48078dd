"""Makes garbage collections rare while a model is traced and planned."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Allocations between collections of the youngest objects. Chosen: hardly any for a large model.
ALLOCATIONS = 10_000_000
# Objects that are frozen before anybody freezes any: none, but some hundreds in Python 3.12.
_FROZEN = gc.get_freeze_count()


@dataclass
class _Blocks:
    """The blocks of all threads that are inside; what the last one out restores, the first one in has saved."""

    inside: int = 0
    thresholds: tuple[int, int, int] = (0, 0, 0)
    freezes: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside > 1:
                return
            self.thresholds, self.freezes = gc.get_threshold(), gc.get_freeze_count() <= _FROZEN
            if self.freezes:
                gc.freeze()
            gc.set_threshold(max(self.thresholds[0], ALLOCATIONS), *self.thresholds[1:])

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            if self.freezes:
                gc.freeze()  # What is unfrozen is in the oldest generation.
                gc.unfreeze()
            gc.set_threshold(*self.thresholds)


_BLOCKS = _Blocks()


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Makes garbage collections rare: tracing and planning create many objects that stay alive, and collections would
    take a fifth of their time. What existed before, torch's modules above all, they leave out. At the end, what is left
    counts as old, so that the next collection does not go through all of it. Threads may be inside at once. Also a
    decorator."""
    _BLOCKS.enter()
    try:
        yield
    finally:
        _BLOCKS.leave()
