"""The meeting point of the ranks' watches, on a thread of the first rank.

Each rank keeps a connection to it, sends a :class:`~.record.Record` at each interval (:mod:`.pace`), and hears that the
hub is there. A connection that closes is a process that ended, whatever ended it. The hub alone decides what is wrong
(:mod:`.diagnosis`), so that all ranks raise the same message. Messages are JSON, one a line, and the first must have
the token that the ranks' store gave out.
"""

from __future__ import annotations

import errno
import hmac
import json
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.content.files_read import ignore_this_thread

from .deputies import HUB
from .diagnosis import Seen, diagnose, patience
from .pace import interval_of
from .process_state import STOPPED, allow_descriptors, state_of
from .record import Record, from_json, letters_from_json
from .traffic import unacknowledged_seconds

# More than any message has.
_MOST_BYTES = 1 << 16
# Intervals without an acknowledgement by its host after which a rank counts as cut off.
# Chosen: five messages.
REACHED = 5.0
# Descriptors that this process may need in addition to those it has and one for each rank.
# Chosen.
_SPARE = 64


@dataclass
class _Peer:
    """One connection; ``rank`` is None until it has named itself."""

    connection: socket.socket
    rank: int | None = None
    unread: bytes = b""
    unsent: bytes = b""


class Hub(threading.Thread):
    """Serves ``ranks`` at ``port``, until it is closed."""

    def __init__(self, ranks: Sequence[int], token: str, host: str) -> None:
        super().__init__(name=HUB, daemon=True)
        self._last: dict[str, object] = {"fault": ""}
        self._token, self._host, self._interval = token, host, interval_of(len(ranks))
        self._seen = {rank: Seen(rank, Record(), interval=self._interval) for rank in ranks}
        self._heard = dict.fromkeys(ranks, time.monotonic())
        self._broken: dict[int, float] = {}
        self._joined: dict[int, _Peer] = {}
        allow_descriptors(len(ranks) + _SPARE)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=len(ranks), dualstack_ipv6=both)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._letters: dict[str, str] = {}
        self._mentioned = 0.0
        self._closing = self._urgent = False
        self.start()

    def close(self, number: int, fault: str) -> None:
        """Ends the thread: the script of this rank ends, after collective call ``number`` or by a ``fault``, which the
        others hear."""
        self._last, self._closing = {"fault": fault, "ended": number}, True
        self.join(2 * self._interval)

    def abandon(self) -> None:
        """Closes the sockets in a fork, which would keep connections open after this process has ended."""
        for each in (self._server, *(peer.connection for peer in self._peers())):
            each.close()

    def run(self) -> None:
        ignore_this_thread()
        told, before, pause = "", time.monotonic(), self._interval / 2
        while not self._closing:
            for key, _ in self._selector.select(pause):
                self._join() if key.fileobj is self._server else self._read(key.data)
            now = time.monotonic()
            if now - before < pause and not self._urgent:
                continue
            self._urgent = False
            paused, before = now - before - pause, now
            if paused > self._interval:
                # This process was stopped, or its GIL taken: what others sent in the meantime is not read yet.
                self._heard = {rank: heard + paused for rank, heard in self._heard.items()}
                continue
            told = told or self._diagnose(now) or ""
            self._tell({"fault": told, "look": [seen.record.where for seen in self._silent(now)]})
        self._tell({**self._last, "fault": told or self._last["fault"]})

    def _diagnose(self, now: float) -> str | None:
        if len(self._joined) < len(self._seen):
            return None
        everyone = [self._as_of(seen, now) for seen in self._seen.values()]
        fault = diagnose(everyone)
        if fault is None:
            self._mention(*patience(everyone))
        return fault

    def _mention(self, waited: float, sentence: str) -> None:
        """Says what ranks wait for; again when they have waited twice as long."""
        if not sentence:
            self._mentioned = 0.0
        elif waited >= 2 * self._mentioned:
            self._mentioned = waited
            print(f"autopar: {sentence} (no error so far)", file=sys.stderr, flush=True)

    def _silent(self, now: float) -> list[Seen]:
        """Ranks of other hosts that do not answer: their neighbours are asked what they see of them."""
        usual = 2 * self._interval
        late = (self._seen[rank] for rank in self._joined if now - self._heard[rank] > usual and self._seen[rank].open)
        return [seen for seen in late if not seen.record.where.endswith(f" on {self._host}")]

    def _as_of(self, seen: Seen, now: float) -> Seen:
        silent = now - self._heard[seen.rank]
        broken = now - self._broken.setdefault(seen.rank, now) if seen.record.state == "broken" else 0.0
        seen = replace(seen, silent=silent, broken=broken)
        if seen.hears or not seen.open:
            return seen
        where = seen.record.where
        letter = state_of(where, self._host) or self._letters.get(where, "")
        connection = self._joined[seen.rank].connection
        reached = unacknowledged_seconds(connection) < REACHED * self._interval
        return replace(seen, stopped=letter in STOPPED, reached=reached)

    def _peers(self) -> list[_Peer]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _join(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._selector.unregister(self._server)  # It would be ready for ever.
                self._warn(f"{len(self._seen) - len(self._joined)} ranks cannot join: {error}")
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _warn(self, why: str) -> None:
        print(
            f"autopar: {why}; faults of ranks will not be named, and may take the process group's timeout. Raise the "
            f"limit of open files of the first rank (ulimit -n) to {len(self._seen) + (1 << 10)}",
            file=sys.stderr,
            flush=True,
        )

    def _read(self, peer: _Peer) -> None:
        try:
            received = peer.connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return
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
                self._joined[peer.rank] = peer
        elif (record := from_json(line)) is not None:
            self._seen[peer.rank] = replace(self._seen[peer.rank], record=record)
            self._urgent = self._urgent or record.state == "broken"  # Its launcher may be about to end it.
        else:
            self._letters.update(letters_from_json(line))
        if peer.rank is not None:
            self._heard[peer.rank] = time.monotonic()

    def _named(self, line: bytes) -> int | None:
        """The rank that a connection says it is, if it has the token."""
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            data = json.loads(line)
            if hmac.compare_digest(str(data["token"]), self._token) and data["rank"] in self._seen:
                return int(data["rank"])
        return None

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None:
            self._seen[peer.rank] = replace(self._seen[peer.rank], open=False)

    def _tell(self, message: dict[str, object]) -> None:
        """Sends without waiting: to a rank that does not read, the next message once it does."""
        text = json.dumps(message).encode() + b"\n"
        for peer in self._peers():
            if peer.rank is None:
                continue
            peer.unsent = peer.unsent or text
            try:
                peer.unsent = peer.unsent[peer.connection.send(peer.unsent) :]
            except BlockingIOError:
                continue
            except OSError:
                self._drop(peer)
