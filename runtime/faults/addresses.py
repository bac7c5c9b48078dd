"""Where other hosts may reach this one."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def own_addresses() -> list[str]:
    """Names and addresses of this host, the likeliest first."""
    host = socket.gethostname()
    found = [host]
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    master = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1")))
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            towards.connect(address)  # Sends nothing; chooses the interface by which the ranks' store is reached.
            found.insert(0, towards.getsockname()[0])
    return list(dict.fromkeys(found))
