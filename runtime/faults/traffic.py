"""What the kernel knows of TCP connections: whether messages move, and whether the other end's host is there."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

from autopar.runtime.torch_internals.interrupt import gloo_sockets

# linux/tcp.h, struct tcp_info: the offsets of the milliseconds since data was sent, since data was received, and since
# an acknowledgement was received.
_SENT, _RECEIVED, _ACKNOWLEDGED = 44, 52, 56
# There too: how often the oldest data was sent again because nobody has acknowledged it, in one byte.
_RETRANSMITS = 2


def quiet_seconds() -> float:
    """For how long no message has moved between this process and other ranks through gloo; infinite where that is not
    known."""
    with gloo_sockets() as connections:
        return quiet_seconds_of(connections)


def quiet_seconds_of(connections: Iterable[socket.socket]) -> float:
    """As :func:`quiet_seconds`, of these connections."""
    known = (found for each in connections if (found := _information(each)) is not None)
    return min(map(_quiet, known), default=float("inf"))


def _quiet(information: bytes) -> float:
    """For how long nothing has moved on a connection. Sending the same again to a host that is cut off, which the
    kernel does for minutes, moves nothing."""
    sent = _ACKNOWLEDGED if information[_RETRANSMITS] else _SENT
    return min(_seconds(information, sent), _seconds(information, _RECEIVED))


def unacknowledged_seconds(connection: socket.socket) -> float:
    """For how long the kernel of the other end has acknowledged nothing, to which something is sent every second. It
    acknowledges for a process that is stopped, too. Infinite where that is not known."""
    information = _information(connection)
    return float("inf") if information is None else _seconds(information, _ACKNOWLEDGED)


def _information(connection: socket.socket) -> bytes | None:
    with suppress(OSError, AttributeError):
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1 << 8)
        return found if len(found) >= _ACKNOWLEDGED + 4 else None
    return None


def _seconds(information: bytes, offset: int) -> float:
    return int(struct.unpack_from("I", information, offset)[0]) / 1000
