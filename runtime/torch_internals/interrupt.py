"""Ends waits for messages that will never come."""

from __future__ import annotations

import gc
import os
import socket
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def ranks_store(prefix: str) -> Any:
    """The store in which the ranks of this world met, with a ``prefix`` to its keys. Relies on ``_get_default_store``
    (2.11)."""
    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())


def interrupt_communication() -> None:
    """Makes every communication of this process that is in flight fail, on whatever thread waits for it. Nothing can be
    sent afterwards.

    NCCL's groups are aborted. gloo's ``abort`` leaves waits waiting (2.13), so its connections are shut down: all
    stream sockets of this process that are neither Python's nor those of the ranks' store. Relies on the groups that
    ``distributed_c10d._world.pg_map`` lists (2.11)."""
    for group in list(distributed_c10d._world.pg_map):
        if "nccl" in str(dist.get_backend_config(group)):
            with suppress(Exception):
                group.abort()
    _shut_down_sockets(spared_port=int(os.environ.get("MASTER_PORT", "0")))


def _shut_down_sockets(spared_port: int) -> None:
    pythons = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        if int(name) in pythons:
            continue
        with suppress(OSError):
            copy = os.dup(int(name))
            try:
                other = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with other:
                if other.family not in (socket.AF_INET, socket.AF_INET6) or other.type != socket.SOCK_STREAM:
                    continue
                if spared_port not in (other.getpeername()[1], other.getsockname()[1]):
                    other.shutdown(socket.SHUT_RDWR)
