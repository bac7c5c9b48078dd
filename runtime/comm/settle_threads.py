"""Lets gloo's threads come to rest before the interpreter ends.

``wait`` on a collective returns once its result is there; gloo's thread drops the tensors only after that, and takes
the GIL for it. Where the interpreter has begun to end by then, Python stops this thread by unwinding it, through a
destructor of C++, and the process aborts: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_THREAD = "pt_gloo_runloop"
# Longer than a thread waits before it asks for the GIL again (sys.getswitchinterval()).
_STEP_SECONDS = 0.006
# Chosen: a thread that still runs then waits for something else.
_MOST_SECONDS = 2.0


@cache
def settle_at_exit() -> None:
    """From now on, :func:`settle_threads` runs when the interpreter begins to end."""
    atexit.register(settle_threads)


def settle_threads() -> None:
    """Returns when all of gloo's threads in this process sleep and have not run for a moment in which they could have
    taken the GIL; after two seconds at most. Where the system does not list threads, it returns at once."""
    deadline = time.monotonic() + _MOST_SECONDS
    before = _activity()
    while before and time.monotonic() < deadline:
        time.sleep(_STEP_SECONDS)
        now = _activity()
        if now == before and all("State:\tS" in status for status in now.values()):
            return
        before = now


def _activity() -> dict[str, str]:
    """Thread -> its state and how often it was switched to, as Linux tells."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that ended meanwhile
            if (task / "comm").read_text().strip() == _THREAD:
                found[task.name] = (task / "status").read_text()
    return found
