"""Runs a function in another process under limits: an unknown operation with generated values may crash, hang, or
change the state of its library, which must not affect the process that plans."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import WorkerError
from autopar.processes.payload import open_payload, payload
from autopar.processes.template import start

# Chosen: planning should not wait long for one operation; one that takes longer is replicated.
CPU_SECONDS = 20
# Chosen: six times as long, for a busy machine.
WALL_SECONDS = 120.0
_ENTRY = "autopar.passes.probe.sandbox:answer"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The ``value`` that the function returned, or its ``failure`` in words; ``crash``: it ended the process, ``late``:
    it exceeded a limit and was ended."""

    value: Any = None
    failure: str = ""
    crash: bool = False
    late: bool = False


def run_apart(function: Callable[[], Any], cpu_seconds: int = CPU_SECONDS, wall: float = WALL_SECONDS) -> Outcome:
    """Runs ``function`` in another process for at most ``cpu_seconds`` of computing. Returns its value as JSON
    represents it. An exception counts as failure, and so does a function that cannot be sent there."""
    reader, writer = os.pipe()
    try:
        with payload((function, cpu_seconds)) as sent:
            child = start(_ENTRY, sent, [writer])
    except WorkerError as error:
        os.close(reader)
        return Outcome(failure=str(error))
    finally:
        os.close(writer)
    try:
        data, late = _read(reader, wall)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        status = child.poll(block=True) or 0
    return _outcome(data, status, late, cpu_seconds, wall)


def answer(descriptor: int, writer: int) -> None:
    """Runs in the other process: writes the function's value or failure, and ends the process."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        faulthandler.disable()
        torch.set_num_threads(1)
        try:
            function, cpu_seconds = open_payload(descriptor)
            _limit(cpu_seconds)
            reply = {"value": function()}
        except Exception as error:
            reply = {"failure": f"{type(error).__name__}: {error}".strip()[:500]}
        left = json.dumps(reply).encode()
        while left:
            left = left[os.write(writer, left) :]
    finally:
        os._exit(0)


def _limit(cpu_seconds: int) -> None:
    """Limits the process's computing from now on."""
    used = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, used + cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(reader: int, wall: float) -> tuple[bytes, bool]:
    """Everything the child writes, and whether it was still writing after ``wall`` seconds."""
    pieces: list[bytes] = []
    end = time.monotonic() + wall
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return b"".join(pieces), True
        piece = os.read(reader, 1 << 16)
        if not piece:
            return b"".join(pieces), False
        pieces.append(piece)


def _outcome(data: bytes, status: int, late: bool, cpu_seconds: int, wall: float) -> Outcome:
    if late:
        return Outcome(failure=f"not done after {wall:g} s", late=True)
    try:
        return Outcome(**json.loads(data))
    except (ValueError, TypeError):
        pass
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended in (signal.SIGXCPU, signal.SIGKILL):
        return Outcome(failure=f"not done after {cpu_seconds} s of computing", late=True)
    cause = signal.Signals(ended).name if ended else f"exit code {os.waitstatus_to_exitcode(status)}"
    return Outcome(failure=f"it ended the process ({cause})", crash=True)
