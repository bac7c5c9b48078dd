"""What the kernel says that processes and threads of this host are doing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# The letters of proc(5) for a thread that computes or waits for a disk, and for one that is stopped.
WORKS = frozenset("RD")
STOPPED = frozenset("Tt")
# Of proc(5), counted from the state: the time computed in the program and in the kernel, in ticks.
_COMPUTED = slice(11, 13)


def state_of(where: str, host: str) -> str:
    """The letter of proc(5) for the main thread of the process at ``where`` (of a :class:`~.record.Record`); "" if it
    has ended, or is not on this ``host``."""
    process, _, its_host = where.removeprefix("process ").partition(" on ")
    return state_in(f"/proc/{process}/stat") if its_host == host and process.isdecimal() else ""


def state_in(path: str) -> str:
    """The letter in the ``stat`` file at ``path``; "" if there is none."""
    return next(iter(_fields(path)), "")


def seconds_computed(folder: str) -> float:
    """By the process or thread of ``folder`` in /proc; 0 if it has ended."""
    return sum(map(int, _fields(f"{folder}/stat")[_COMPUTED])) / os.sysconf("SC_CLK_TCK")


def bytes_moved(folder: str) -> int:
    """Read and written by the process or thread of ``folder`` in /proc, through system calls and to disks; 0 if it has
    ended."""
    with suppress(OSError, ValueError):
        lines = Path(f"{folder}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar", "read_", "write_")))
    return 0


def _fields(path: str) -> list[str]:
    """What follows the name in a ``stat`` file."""
    with suppress(OSError):
        return Path(path).read_text().rpartition(")")[2].split()
    return []


def allow_descriptors(more: int) -> None:
    """Raises this process's own limit of open files, as far as the system allows, so that it may open ``more``."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = len(os.listdir("/proc/self/fd")) + more
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def descendants() -> list[str]:
    """The folders in /proc of the processes that this one has started, and of those that they have."""
    found, left = list[str](), [str(os.getpid())]
    while left:
        for children in Path(f"/proc/{left.pop()}/task").glob("*/children"):
            with suppress(OSError):
                left += (own := children.read_text().split())
                found += [f"/proc/{each}" for each in own]
    return found
