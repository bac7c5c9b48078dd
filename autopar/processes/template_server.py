"""The template: a process that imports what its copies need, and does nothing but fork them.

It runs no operation of torch, so it has none of torch's threads, no process group and no CUDA context; its copies can
therefore do what a fresh process can. It ends when the process that started it does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

# Bytes of a length, process id or status: a 64-bit integer.
HEADER = 8
# Descriptors taken with a request. Chosen: above the few that a request is sent with.
MAX_FDS = 16
Entry = Callable[..., None]


def serve(descriptor: int) -> NoReturn:
    """Forks a copy for each request on the socket ``descriptor``, until it closes."""
    first = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    server = _Server([first], {}, (woken, waker))
    while True:
        awaited: list[Any] = [woken, *server.connections]
        ready, _, _ = select.select(awaited, [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 12)
            server.reap()
        for connection in ready:
            if isinstance(connection, socket.socket) and not server.answer(connection):
                if connection is first:
                    os._exit(0)
                server.connections.remove(connection)
                connection.close()


@dataclass
class _Server:
    """``connections`` lead to the process that started the template and to its copies, which may ask for copies too;
    ``reports`` are the pipes that wait for the status of each copy."""

    connections: list[socket.socket]
    reports: dict[int, int]
    own: tuple[int, int]

    def reap(self) -> None:
        """Reports the status of each copy that has ended."""
        while self.reports:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            report = self.reports.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(report, status.to_bytes(HEADER, "little"))
            os.close(report)

    def answer(self, connection: socket.socket) -> bool:
        """Forks the copy that the next request asks for; False if the connection is closed."""
        try:
            header, fds, _, _ = socket.recv_fds(connection, HEADER, MAX_FDS)
            request = _receive(connection, int.from_bytes(header, "little")) if header else b""
        except ConnectionError:
            return False
        if not request:
            return False
        modules, path, entry, arguments = pickle.loads(request)
        _import(modules, path)
        here, there = socket.socketpair()
        with warnings.catch_warnings():
            # A library that started threads when it was imported (OpenBLAS, for one) handles the fork itself.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            for inherited in (here, *self.connections):
                inherited.close()
            _run_copy(entry, fds, arguments, (*self.own, *self.reports.values()), there)
        there.close()
        self.connections.append(here)
        self.reports[pid] = fds[0]
        for descriptor in fds[1:]:
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(pid.to_bytes(HEADER, "little"))
        return True


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _import(modules: list[str], path: list[str]) -> None:
    """Imports ``modules`` for all later copies. What cannot be imported here raises in the copy that needs it."""
    missing = [name for name in modules if name not in sys.modules]
    if not missing:
        return
    before, sys.path[:] = list(sys.path), path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in missing:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    sys.path[:] = before
    gc.collect()
    gc.freeze()


def _run_copy(
    entry: str, fds: list[int], arguments: tuple[object, ...], unused: tuple[int, ...], connection: socket.socket
) -> NoReturn:
    """Runs a copy: calls ``entry``, as ``module:function``, with its descriptors. ``connection`` leads back to the
    template."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status, task, out, err, *pipes = fds
        for descriptor in (status, *unused):
            os.close(descriptor)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for descriptor in (out, err):
            os.close(descriptor)
        importlib.import_module("autopar.processes.template").adopt(connection)
        module, _, function = entry.partition(":")
        called: Entry = getattr(importlib.import_module(module), function)
        called(task, *pipes, *arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
