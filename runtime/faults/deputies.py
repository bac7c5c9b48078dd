"""What works for a thread while it rests itself: other threads of Python, and the processes that were started."""

from __future__ import annotations

import threading
import time

from .process_state import bytes_moved, descendants, seconds_computed

# The names of the threads that look on.
WATCH, HUB, INTERRUPT = "autopar watch", "autopar hub", "autopar interrupt"
# They work if together they compute this share of the time, or move so many bytes a second.
# Chosen: what only waits does less, pollers and loggers included.
_BUSY, _BYTES = 0.05, 1 << 16
# Intervals after which an earlier look says nothing.
# Chosen.
_OLD = 3.0


class Deputies:
    """Looks at what may help a thread."""

    def __init__(self, interval: float) -> None:
        self._old = _OLD * interval
        self._looked, self._before = float("-inf"), dict[str, tuple[float, int]]()

    def work(self, thread: int) -> bool:
        """Whether those of the ``thread`` (its number in the kernel) have worked since the last look; yes if that was
        long ago."""
        now, done = time.monotonic(), {each: (seconds_computed(each), bytes_moved(each)) for each in _folders(thread)}
        passed, before = now - self._looked, self._before
        self._looked, self._before = now, done
        pairs = [(after, before.get(folder, (0.0, 0))) for folder, after in done.items()]
        computed = sum(max(0.0, after[0] - earlier[0]) for after, earlier in pairs)
        moved = sum(max(0, after[1] - earlier[1]) for after, earlier in pairs)
        return passed > self._old or computed > _BUSY * passed or moved > _BYTES * passed


def _folders(thread: int) -> list[str]:
    """Of the threads and processes, in /proc. Not of threads of C++, of which some compute while they wait."""
    others = (each for each in threading.enumerate() if each.name not in (WATCH, HUB, INTERRUPT))
    numbers = {each.native_id for each in others} - {thread, None}
    return [*(f"/proc/self/task/{number}" for number in numbers), *descendants()]
