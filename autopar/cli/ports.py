"""Ports by which the processes of a job meet: are they free, reached, open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from autopar.errors import FaultError
from autopar.processes.port_owner import is_taken, port_owner
from autopar.runtime.faults.meeting import join_world

from .finding import Finding
from .rendezvous import DEFAULT_PORT

# The master's port of torchrun without a rendezvous, and of most tutorials.
_MASTER_PORT = 29500
# Seconds after which a rank says who is not there yet; it waits ten times as long.
# Chosen: launchers start the hosts of a job within a minute or two.
_MEETING_SECONDS = 12.0
# What ranks may take to connect to each other, and for one message.
# Chosen: a hundred times what either takes on slow Ethernet.
_LIMIT = timedelta(minutes=2)
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def own_ports() -> Finding:
    """Whether the ports that jobs usually meet at are free here. A job that runs may have taken them."""
    taken = [f"{port} is taken{port_owner(port)}" for port in (DEFAULT_PORT, _MASTER_PORT) if is_taken(port)]
    if not taken:
        return Finding("ports", f"{DEFAULT_PORT} and {_MASTER_PORT}, at which jobs meet, are free")
    advice = "a job that meets here takes another: autopar run --rendezvous HOST:PORT, torchrun --master-port"
    return Finding("ports", ", ".join(taken), True, advice)


@contextmanager
def in_group() -> Iterator[None]:
    """A context in which the processes that a launcher started have a gloo group. Raises :class:`FaultError` that says
    which rank is not there, who has taken the master's port, or who is not reached."""
    try:
        join_world("gloo", _MEETING_SECONDS, "autopar doctor", _LIMIT)
    except RuntimeError as error:
        if isinstance(error, FaultError):
            raise
        raise FaultError(
            f"all ranks reached {_master()}, but not each other: {str(error).splitlines()[0]}. Between hosts, ports "
            f"{_listened()} must be open; a host with several networks, or whose name is 127.0.1.1 in /etc/hosts, "
            "needs GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (ip address lists the interfaces)"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def job_ports() -> Finding:
    """In a group of all processes: they have reached the master's port and each other."""
    return Finding("ports", f"all reach {_master()}, and each other at ports {_listened()}")


def _master() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def _listened() -> str:
    """The ports that the system gives to programs that want any, as gloo and NCCL do."""
    try:
        return "-".join(_PORT_RANGE.read_text().split())
    except OSError:
        return "of any number"
