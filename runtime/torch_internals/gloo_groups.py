"""Process groups of gloo that the ranks of the world make among some of them, however many others have left.

``dist.new_group`` names groups by how many there were before, which ranks that were interrupted do not agree on, and
keeps each for as long as the process runs.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from .interrupt import connection_of, gloo_sockets


def is_of_connections(error: BaseException) -> bool:
    """Whether ``error`` says that communication failed. Relies on gloo's errors, which are plain RuntimeErrors that
    begin with the place in its source (2.11); others raise them too, such as the writer of a full disk."""
    said = isinstance(error, RuntimeError) and "gloo/" in str(error).partition("]")[0]
    return isinstance(error, dist.DistError) or said


class Opened:
    """The connections that this process opens within the context: those of a group that is made there.
    ``interrupted``: whether this process has ended them."""

    interrupted = False

    def __enter__(self) -> Self:
        self._inodes = set(_sockets().values())
        return self

    def __exit__(self, *_: object) -> None:
        # By the numbers of inodes, since descriptors are used again.
        self._inodes = set(_sockets().values()) - self._inodes

    def connections(self, stack: ExitStack) -> list[socket.socket]:
        """Copies of them, until ``stack`` closes; none where the system does not tell."""
        known = {os.fstat(each.fileno()).st_ino for each in stack.enter_context(gloo_sockets())}
        found = []
        for number, inode in _sockets().items():
            # Another thread may have opened a socket meanwhile.
            if inode in self._inodes and (not known or inode in known):
                connection = connection_of(number)
                if connection is not None:
                    found.append(stack.enter_context(connection))
        return found

    def interrupt(self) -> None:
        """Makes every communication through them fail, here and at their other ends."""
        self.interrupted = True
        with ExitStack() as stack:
            for each in self.connections(stack):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


class GlooGroup:
    """A group between CPUs of ``size`` processes, this one at ``rank``, which meet in ``store`` under a prefix of their
    own. Collective. Raises RuntimeError if some do not come within ``come``; ``limit``: what one communication may
    take. Relies on ``ProcessGroup(store, rank, size)``, ``_register_backend``, ``_set_default_backend`` and
    ``_set_default_timeout`` (2.11)."""

    def __init__(self, store: Any, rank: int, size: int, come: timedelta, limit: timedelta) -> None:
        with Opened() as self.opened:
            backend = dist.ProcessGroupGloo(store, rank, size, come)
        backend._set_default_timeout(limit)
        self.group: Any = dist.ProcessGroup(store, rank, size)
        self.group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self.group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def _sockets() -> dict[int, int]:
    """The inode of each socket of this process by its descriptor; empty where the system does not tell."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                kind, _, inode = os.readlink(Path("/proc/self/fd", name)).partition(":")
                if kind == "socket":
                    found[int(name)] = int(inode.strip("[]"))
    return found
