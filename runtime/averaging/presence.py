"""Whether the process of another rank is there: its kernel refuses connections to a port once nobody listens.

A process that is stopped, or busy, is there; of a host that is cut off nothing is known. So only a refusal counts, and
only from an address that has accepted before: behind another one there may be another host.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress

from autopar.content.files_read import ignore_this_thread
from autopar.runtime.faults.addresses import own_addresses

from .ledger import Ledger
from .waits import LostPeersError

# Seconds for an answer of the other host.
# Chosen: longer than between continents.
_ANSWER_SECONDS = 2.0
# Looks that the kernel of a process that is stopped accepts for it.
# Chosen: as many as Linux queues by default (net.core.somaxconn).
_LOOKS = 4096


class Presence:
    """Lets others look whether ``rank`` is there, and looks at those itself that :meth:`meet` has found."""

    def __init__(self, ledger: Ledger, rank: int) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=_LOOKS, dualstack_ipv6=both)
        if hasattr(os, "register_at_fork"):  # A worker of a loader outlives its rank for some seconds.
            os.register_at_fork(after_in_child=self._server.close)
        threading.Thread(target=self._accept, name="autopar presence", daemon=True).start()
        self._ledger = ledger
        ledger.publish(f"port/{rank}", json.dumps([self._server.getsockname()[1], *own_addresses()]))
        self._found: dict[int, tuple[str, int]] = {}

    def _accept(self) -> None:
        """Takes looks off the queue, which the kernel has answered."""
        ignore_this_thread()
        with suppress(OSError):
            while True:
                self._server.accept()[0].close()

    def meet(self, others: Iterable[int]) -> None:
        """Finds out by which addresses ``others``, which have made theirs, can be reached."""
        for rank in others:
            text = self._ledger.published(f"port/{rank}")
            if text is None:
                raise LostPeersError(f"rank {rank} has not come")
            port, *addresses = json.loads(text)
            reached = ((host, port) for host in addresses if _answer(host, port) == "accepted")
            found = next(reached, None)
            if found is not None:
                self._found[rank] = found

    def is_gone(self, rank: int) -> bool:
        """Whether it is known that the process of ``rank`` has ended."""
        if rank not in self._found:
            return False
        answer = _answer(*self._found[rank])
        if answer == "none":  # Cut off: further looks would take as long.
            del self._found[rank]
        return answer == "refused"


def _answer(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "none"
    return "accepted"
