"""Whether a port is taken, and by which process."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path


def is_taken(port: int) -> bool:
    """Whether a program listens at ``port`` of this host."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def port_owner(port: int) -> str:
    """`` (process 12: python server.py)`` for the process of this user that listens at ``port`` of this host; "" if
    that is not known."""
    wanted = f":{port:04X}"
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            inodes |= {f"socket:[{row[9]}]" for row in rows if row[1].endswith(wanted) and row[3] == "0A"}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(link) in inodes for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" (process {process.name}: {command[:100]})"
    return ""
