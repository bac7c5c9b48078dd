"""Ends waits for messages that will never come."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# The thread of each of gloo's devices, which waits for all of its connections in one epoll (2.13), and those that
# run its operations.
_GLOO_THREAD, _GLOO_RUNS = "gloo_tcp_loop", "pt_gloo_runloop"
# Looks at such a thread, which may be at work and not in its wait, and seconds between them.
# Chosen: a fifth of a second in all, time slices of a busy machine.
_LOOKS, _BETWEEN_LOOKS = 20, 0.01


def ranks_store(prefix: str) -> Any:
    """The store in which the ranks of this world met, with a ``prefix`` to its keys. Relies on ``_get_default_store``
    (2.11)."""
    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())


def interrupt_communication() -> None:
    """Makes every communication of this process that is in flight fail, on whatever thread waits for it. Nothing can be
    sent afterwards.

    NCCL's groups are aborted. gloo's ``abort`` leaves waits waiting (2.13), so the connections of its groups are shut
    down, and no others: a notebook's or a logger's stay. Where they are not known (:func:`gloo_sockets`) nothing is,
    and waits go on. Relies on the groups that ``distributed_c10d._world.pg_map`` lists (2.11)."""
    for group in list(distributed_c10d._world.pg_map):
        if "nccl" in str(dist.get_backend_config(group)):
            with suppress(Exception):
                group.abort()
    with gloo_sockets() as connections:
        for each in connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def gloo_sockets() -> Iterator[list[socket.socket]]:
    """Copies of the connections of this process for which gloo's threads wait; none where Linux does not tell, which
    some containers forbid. Relies on the names of gloo's threads (2.13; 2.11 has others, see :func:`_gloo_threads`)."""
    found: list[socket.socket] = []
    for epoll in {each for thread in _gloo_threads() if (each := _waits_for(thread)) is not None}:
        with suppress(OSError):
            watched = re.findall(r"^tfd:\s*(\d+)", Path(f"/proc/self/fdinfo/{epoll}").read_text(), re.MULTILINE)
            for number in map(int, watched):
                copy = connection_of(number)
                if copy is not None:
                    found.append(copy)
    try:
        yield found
    finally:
        for connection in found:
            connection.close()


def _gloo_threads() -> list[Path]:
    """The folders of the threads in /proc. Before torch 2.13 (2.11) they have the name of the process, as no other
    threads do that wait for connections, but for Python's."""
    names: dict[Path, str] = {}
    for thread in Path("/proc/self/task").glob("*") if Path("/proc/self/task").is_dir() else ():
        with suppress(OSError):
            names[thread] = (thread / "comm").read_text().strip()
    named = [thread for thread, name in names.items() if name == _GLOO_THREAD]
    if named or _GLOO_RUNS not in names.values():
        return named
    pythons = {str(thread.native_id) for thread in threading.enumerate()}
    own = names.get(Path(f"/proc/self/task/{os.getpid()}"))
    return [thread for thread, name in names.items() if name == own and thread.name not in pythons]


def _waits_for(thread: Path) -> str | None:
    """The descriptor of the epoll that the thread is waiting for."""
    for _ in range(_LOOKS):
        with suppress(OSError, IndexError, ValueError):
            number = str(int((thread / "syscall").read_text().split()[1], 16))
            if "eventpoll" in os.readlink(f"/proc/self/fd/{number}"):
                return number
        time.sleep(_BETWEEN_LOOKS)
    return None


def connection_of(number: int) -> socket.socket | None:
    """A copy of a descriptor, if it is a connection: gloo ends the process if it cannot listen any more. Relies on that
    (2.11)."""
    with suppress(OSError):
        copy = os.dup(number)
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return None
        try:
            found.getpeername()
            return found
        except OSError:
            found.close()
    return None
