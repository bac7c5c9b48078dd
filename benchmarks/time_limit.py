"""A limit to the seconds that a piece of a benchmark may take."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """A time limit is over. No ``Exception``, so that nothing on the way takes it for a fault of its own."""


@contextmanager
def time_limit(seconds: float, *, processor: bool = False) -> Iterator[None]:
    """Within, :class:`OutOfTime` is raised after ``seconds``, of this process's ``processor`` time or of the clock on
    the wall, between two steps of Python: a call of a kernel or of a collective is not interrupted. For the main
    thread; a limit of the same kind inside another one ends both."""
    which, number = (signal.ITIMER_PROF, signal.SIGPROF) if processor else (signal.ITIMER_REAL, signal.SIGALRM)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"not done within {seconds:.0f} seconds")

    before = signal.signal(number, stop)
    signal.setitimer(which, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(which, 0.0)
        signal.signal(number, before)
