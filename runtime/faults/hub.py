"""The meeting point of the ranks' watches, on a thread of the first rank.

Each rank keeps a connection to it, sends a :class:`~.record.Record` about once a second, and hears that the hub is
there. A connection that closes is a process that ended, whatever ended it. The hub alone decides what is wrong
(:mod:`.diagnosis`), so that all ranks raise the same message. Messages are JSON, one a line, and the first must have
the token that the ranks' store gave out.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from .diagnosis import Seen, diagnose
from .process_state import STOPPED, WORKS, state_of
from .record import Record, from_json

# Seconds between two messages of a rank, and of the hub.
# Chosen: a fault is known within seconds, at less than a thousandth of a processor.
INTERVAL = 1.0
# More than any message has.
_MOST_BYTES = 1 << 16


@dataclass
class _Peer:
    """One connection; ``rank`` is None until it has named itself."""

    connection: socket.socket
    rank: int | None = None
    unread: bytes = b""


class Hub(threading.Thread):
    """Serves ``ranks`` at ``port``, until it is closed."""

    def __init__(self, ranks: Sequence[int], token: str, host: str) -> None:
        super().__init__(name="autopar hub", daemon=True)
        self._token, self._host = token, host
        self._seen = {rank: Seen(rank, Record()) for rank in ranks}
        self._heard = dict.fromkeys(ranks, time.monotonic())
        self._broken: dict[int, float] = {}
        self._joined: set[int] = set()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=len(ranks), dualstack_ipv6=both)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._closing = self._urgent = False
        self.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True

    def abandon(self) -> None:
        """Closes the sockets in a fork, which would keep connections open after this process has ended."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def run(self) -> None:
        told, before = "", time.monotonic()
        while not self._closing:
            for key, _ in self._selector.select(INTERVAL / 2):
                self._join() if key.fileobj is self._server else self._read(key.data)
            now = time.monotonic()
            if now - before < INTERVAL / 2 and not self._urgent:
                continue
            self._urgent = False
            paused, before = now - before - INTERVAL / 2, now
            if paused > INTERVAL:
                # This process was stopped, or its GIL taken: what others sent in the meantime is not read yet.
                self._heard = {rank: heard + paused for rank, heard in self._heard.items()}
                continue
            told = told or self._diagnose(now) or ""
            self._tell(json.dumps({"fault": told}))

    def _diagnose(self, now: float) -> str | None:
        if len(self._joined) < len(self._seen):
            return None
        return diagnose([self._as_of(seen, now) for seen in self._seen.values()])

    def _as_of(self, seen: Seen, now: float) -> Seen:
        silent = now - self._heard[seen.rank]
        broken = now - self._broken.setdefault(seen.rank, now) if seen.record.state == "broken" else 0.0
        state = state_of(seen.record.where, self._host) if silent > INTERVAL else ""
        return replace(seen, silent=silent, broken=broken, stopped=state in STOPPED, computes=state in WORKS)

    def _join(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.settimeout(INTERVAL)
            self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _read(self, peer: _Peer) -> None:
        try:
            received = peer.connection.recv(_MOST_BYTES)
        except OSError:
            received = b""
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        for line in lines:
            self._take(peer, line)
        if not received or len(peer.unread) > _MOST_BYTES:
            self._drop(peer)

    def _take(self, peer: _Peer, line: bytes) -> None:
        if peer.rank is None:
            peer.rank = self._named(line)
            if peer.rank is None:
                peer.unread = b" " * (_MOST_BYTES + 1)  # Not one of us: dropped.
            else:
                self._joined.add(peer.rank)
        elif (record := from_json(line)) is not None:
            self._seen[peer.rank] = replace(self._seen[peer.rank], record=record)
            self._urgent = self._urgent or record.state == "broken"  # Its launcher may be about to end it.
        if peer.rank is not None:
            self._heard[peer.rank] = time.monotonic()

    def _named(self, line: bytes) -> int | None:
        """The rank that a connection says it is, if it has the token."""
        with suppress(ValueError, TypeError, KeyError):
            data = json.loads(line)
            if hmac.compare_digest(str(data["token"]), self._token) and data["rank"] in self._seen:
                return int(data["rank"])
        return None

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None:
            self._seen[peer.rank] = replace(self._seen[peer.rank], open=False)

    def _tell(self, text: str) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data.rank is not None:
                try:
                    key.data.connection.sendall(text.encode() + b"\n")
                except OSError:
                    self._drop(key.data)
