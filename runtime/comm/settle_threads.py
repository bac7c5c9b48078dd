"""Waits for gloo's threads to become idle before the interpreter exits.

``wait`` on a collective returns once its result has arrived; gloo's thread drops the tensors only after that, and takes
the GIL for it. If the interpreter has begun to exit by then, Python stops this thread by unwinding it, through a C++
destructor, and the process aborts: "terminate called without an active exception".
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
    """Registers :func:`settle_threads` to run when the interpreter begins to exit."""
    atexit.register(settle_threads)


def settle_threads() -> None:
    """Waits until all of gloo's threads in this process sleep and have not run for an interval in which they could have
    taken the GIL; at most two seconds. Returns at once if the system does not list threads."""
    deadline = time.monotonic() + _MOST_SECONDS
    before = _activity()
    while before and time.monotonic() < deadline:
        time.sleep(_STEP_SECONDS)
        now = _activity()
        if now == before and all("State:\tS" in status for status in now.values()):
            return
        before = now


def _activity() -> dict[str, str]:
    """The status text of each thread from Linux: its state and its context switches."""
    status_of = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that ended meanwhile
            if (task / "comm").read_text().strip() == _THREAD:
                status_of[task.name] = (task / "status").read_text()
    return status_of
