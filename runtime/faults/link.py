"""A rank's connection to the hub, and the thread that keeps it."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autopar.content.files_read import ignore_this_thread

from .deputies import WATCH
from .hub import REACHED
from .pace import INTERVAL
from .process_state import state_of
from .record import Record, to_json
from .traffic import unacknowledged_seconds

# Seconds to try one address of the hub.
# Chosen.
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Silence:
    """For how many ``seconds`` nothing was heard of the hub, infinite once its connection has closed; after which call
    the script of its rank ``ended``, if it said so; whether its host can be ``reached``."""

    seconds: float
    ended: int | None = None
    reached: bool = True


class Link(threading.Thread):
    """Sends ``look()`` to the hub at once when asked to, else at each interval; calls ``hear(fault, silence)`` at each
    interval: the hub's message about a fault ("" for none), and what is known of the hub itself."""

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        hello: str,
        look: Callable[[], Record],
        hear: Callable[[str, Silence], None],
        interval: float = INTERVAL,
    ) -> None:
        super().__init__(name=WATCH, daemon=True)
        self._look, self._hear, self._interval = look, hear, interval
        self._connection = connect(addresses, port)
        self._connection.sendall(f"{hello}\n{to_json(look())}\n".encode())
        self._bell, self._ring = socket.socketpair()
        self._sent = threading.Event()
        self._unread, self._silent, self._fault = b"", 0.0, ""
        self._ended: int | None = None
        self._closing = False
        self.start()

    def send_now(self, seconds: float) -> None:
        """Sends what ``look()`` returns now; waits until it is sent, at most ``seconds``."""
        self._sent.clear()
        with suppress(OSError):
            self._ring.send(b"!")
            self._sent.wait(seconds)

    def close(self) -> None:
        """Ends the thread and the connection."""
        self._closing = True
        self._ring.send(b"!")
        self.join()
        self.abandon()

    def abandon(self) -> None:
        """Closes the sockets in a fork."""
        for each in (self._connection, self._bell, self._ring):
            each.close()

    def run(self) -> None:
        ignore_this_thread()
        before, gone = time.monotonic(), False
        while not self._closing:
            if self._bell in self._wait(gone):
                self._bell.recv(1 << 10)
            now = time.monotonic()
            passed, before = now - before, now
            gone = gone or not self._exchange()
            self._sent.set()
            # Longer than that this thread did not run: the process was stopped, or its GIL taken.
            self._silent = float("inf") if gone else self._silent + min(passed, 2 * self._interval)
            reached = gone or unacknowledged_seconds(self._connection) < REACHED * self._interval
            self._hear(self._fault, Silence(self._silent, self._ended, reached))

    def _wait(self, gone: bool) -> list[socket.socket]:
        """Waits for an interval, for the bell, or for a message about a fault."""
        deadline = time.monotonic() + self._interval
        while (left := deadline - time.monotonic()) > 0:
            ready = _readable([self._bell] if gone else [self._bell, self._connection], left)
            if self._connection in ready and (not self._read() or self._fault):
                return ready
            if self._bell in ready:
                return ready
        return []

    def _exchange(self) -> bool:
        """Sends a record; False once the hub is gone."""
        try:
            self._connection.sendall(to_json(self._look()).encode() + b"\n")
        except TimeoutError:
            return True
        except OSError:
            return False
        return not _readable([self._connection], 0.0) or self._read()

    def _read(self) -> bool:
        """Reads what the hub sent; False at the end of the connection."""
        try:
            received = self._connection.recv(1 << 16)
        except OSError:
            received = b""
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            self._silent = 0.0
            with suppress(ValueError, AttributeError, TypeError, RecursionError):
                self._take(json.loads(line))
        return bool(received)

    def _take(self, message: dict[str, Any]) -> None:
        self._fault = self._fault or str(message.get("fault", ""))
        self._ended = message.get("ended", self._ended)
        host = socket.gethostname()
        letters = {where: letter for where in message.get("look", ()) if (letter := state_of(where, host))}
        if letters:
            with suppress(OSError):
                self._connection.sendall(json.dumps({"letters": letters}).encode() + b"\n")


def _readable(connections: Sequence[socket.socket], seconds: float) -> list[Any]:
    """Those from which something can be read, at once or within so many seconds. Not by ``select``, which takes no
    descriptors from 1024 on, and the first rank has one for each rank."""
    with selectors.DefaultSelector() as selector:
        for each in connections:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def connect(addresses: Sequence[str], port: int) -> socket.socket:
    """A connection to the first of ``addresses`` that can be reached. Raises :class:`OSError` if none can."""
    failure: OSError = OSError("no address")
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), _CONNECT_SECONDS)
            connection.settimeout(INTERVAL)
            return connection
        except OSError as error:
            failure = error
    raise failure
