"""Looks at the place where hosts meet before torch's launcher does, which waits in silence for minutes."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autopar.errors import OptionsError
from autopar.processes.port_owner import port_owner

# That of torch's launcher.
DEFAULT_PORT = 29400
# Chosen: a store on this host or a near one answers within milliseconds.
_ANSWER_SECONDS = 3.0


def check_endpoint(endpoint: str) -> None:
    """Raises :class:`OptionsError` if ``endpoint`` (HOST:PORT) names no host, or a port of this host that another
    program has taken. Says on stderr if it is on another host and nothing listens there yet."""
    host, port_text = _parts(endpoint)
    if not port_text.isdecimal() or not 0 < int(port_text) < 1 << 16:
        raise OptionsError(
            f"--rendezvous {endpoint}: {port_text!r} is not a port; write HOST:PORT, such as host0:29400, and an IPv6 "
            "address in brackets, [::1]:29400"
        )
    port = int(port_text)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OptionsError(f"--rendezvous {endpoint}: there is no host {host!r} ({error})") from error
    own = [address for address in addresses if _bind(address, 0) == 0]
    if own:
        if any(_bind(address, port) == errno.EADDRINUSE for address in own) and not _is_store(host, port):
            raise OptionsError(
                f"--rendezvous {endpoint}: port {port} of this host is taken by another program{port_owner(port)}, "
                "which is no rendezvous of torch: choose another port, the same on every host, or end that program"
            )
    elif not _listens(host, port):
        print(
            f"autopar run: nothing listens at {endpoint} yet; waiting for `autopar run` on {host}, which must be able "
            f"to be reached at port {port}",
            file=sys.stderr,
            flush=True,
        )


def _parts(endpoint: str) -> tuple[str, str]:
    """Host and port, as torch's launcher takes them: IPv6 addresses are in brackets."""
    if endpoint.startswith("["):
        host, _, rest = endpoint[1:].partition("]")
        return host, rest.removeprefix(":") if rest else str(DEFAULT_PORT)
    if endpoint.count(":") > 1:
        return endpoint, ""  # Its last group may or may not be a port.
    host, _, port = endpoint.partition(":")
    return host, port if ":" in endpoint else str(DEFAULT_PORT)


def _bind(address: tuple[Any, ...], port: int) -> int:
    """The error number of binding a socket to the host of ``address``, 0 if it can be bound."""
    family, kind, protocol = address[:3]
    try:
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((address[4][0], port))
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _is_store(host: str, port: int) -> bool:
    """Whether a store of torch answers. Something else may never answer, and torch's client would wait; or answer, and
    it would print a trace."""
    answered = threading.Event()

    def ask() -> None:
        with suppress(RuntimeError):
            limit = timedelta(seconds=_ANSWER_SECONDS)
            store = dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)  # type: ignore[attr-defined]
            store.add("autopar/asked", 1)
            answered.set()

    with _without_stderr():
        threading.Thread(target=ask, daemon=True).start()
        return answered.wait(_ANSWER_SECONDS)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drops what C++ writes to stderr."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
