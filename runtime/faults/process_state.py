"""What the kernel says that a process of this host is doing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# The letters of proc(5) for a process that computes or waits for a disk, and for one that is stopped.
WORKS = frozenset("RD")
STOPPED = frozenset("Tt")


def state_of(where: str, host: str) -> str:
    """The letter of proc(5) for the main thread of the process at ``where`` (of a :class:`~.record.Record`); "" if it
    has ended, or is not on this ``host``."""
    process, _, its_host = where.removeprefix("process ").partition(" on ")
    return state_in(f"/proc/{process}/stat") if its_host == host and process.isdecimal() else ""


def state_in(path: str) -> str:
    """The letter in the ``stat`` file at ``path``; "" if there is none."""
    with suppress(OSError, IndexError):
        return Path(path).read_text().rpartition(")")[2].split()[0]
    return ""
