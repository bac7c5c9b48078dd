"""Starts processes from the template (:mod:`.template_server`), which is started when first needed and then reused.

``os.fork`` here would copy a process without its threads (of torch's autograd, of OpenMP, of gloo): on a CUDA build of
torch the copy cannot run autograd, and elsewhere it may wait for ever. A new interpreter imports torch again, which
takes seconds. A copy of the template has neither fault.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from autopar.errors import WorkerError

from .child import Child, template_child
from .payload import Payload
from .template_server import HEADER

_CODE = "from autopar.processes.template_server import serve; serve({})"
# This process has already warned of a version of torch that is not supported.
_QUIETLY = ("-W", "ignore:autopar supports torch")
# What every copy needs to open its payload.
_ALWAYS = ("torch.distributed", "cloudpickle", "autopar.processes.payload")


@dataclass
class Template:
    """This process's connection to the template; ``process`` is None in a copy, which shares the template with the
    process that started it."""

    connection: socket.socket
    process: subprocess.Popen[bytes] | None = None
    user: int = field(default_factory=os.getpid)

    @classmethod
    def started(cls) -> Template:
        """Starts a new template."""
        here, there = socket.socketpair()
        with there:
            process = subprocess.Popen(
                [sys.executable, *_QUIETLY, "-c", _CODE.format(there.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                process_group=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return cls(here, process)

    @property
    def usable(self) -> bool:
        """Whether it is running, and belongs to this process and not to one that this process was forked from."""
        return self.user == os.getpid() and (self.process is None or self.process.poll() is None)

    def start(self, entry: str, payload: Payload, pipes: Sequence[int], arguments: Sequence[object]) -> Child:
        """Starts a copy that calls ``entry`` with descriptors of the payload and ``pipes``, as numbered in the copy."""
        request = pickle.dumps(([*_ALWAYS, *payload.modules], list(sys.path), entry, tuple(arguments)))
        reading, writing = os.pipe()
        with ExitStack() as stack:
            stack.callback(os.close, writing)
            out, err = (_descriptor_of(stack, number) for number in (1, 2))
            socket.send_fds(
                self.connection,
                [len(request).to_bytes(HEADER, "little")],
                [writing, payload.descriptor, out, err, *pipes],
            )
            self.connection.sendall(request)
            answer = self.connection.recv(HEADER, socket.MSG_WAITALL)
        if not answer:
            os.close(reading)
            raise ConnectionResetError("it ended")
        return template_child(int.from_bytes(answer, "little"), reading)

    def end(self) -> None:
        """Ends it; its copies end with it."""
        self.connection.close()
        if self.process is not None and self.user == os.getpid():
            self.process.wait()


_template: Template | None = None
_lock = threading.Lock()


def start(entry: str, payload: Payload, pipes: Sequence[int] = (), arguments: Sequence[object] = ()) -> Child:
    """Starts a process that calls ``entry`` (``module:function``) with a descriptor for ``open_payload``, with
    ``pipes``, and with plain objects ``arguments``. It has the standard output and error of this process. Raises
    :class:`WorkerError` if it cannot be started."""
    sys.stdout.flush()
    sys.stderr.flush()
    with _lock:
        try:
            return template().start(entry, payload, pipes, arguments)
        except OSError as error:
            raise WorkerError(f"cannot start a process from the template: {error}") from error


def template() -> Template:
    """The template of this process, started if there is none."""
    global _template
    if _template is None or not _template.usable:
        if _template is not None:
            _template.connection.close()
        _template = Template.started()
    return _template


def adopt(connection: socket.socket) -> None:
    """Makes a copy start its own processes from the template that it was forked from."""
    global _template
    _template = Template(connection)


@atexit.register
def _end() -> None:
    if _template is not None:
        with suppress(OSError):
            _template.end()


def _descriptor_of(stack: ExitStack, number: int) -> int:
    """``number``, or a descriptor of the null device if that is closed."""
    try:
        os.fstat(number)
        return number
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, null)
        return null
