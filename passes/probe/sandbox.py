"""Runs a function in a forked process, under limits: an operation nobody knows, given made-up values, may crash, hang,
or change the state of its own library, and none of that is to reach the process that plans.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CPU_SECONDS = 20
WALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """``value`` as the function returned it, or ``failure`` in words: ``crash`` says it took the process with it,
    ``late`` that it was ended."""

    value: Any = None
    failure: str = ""
    crash: bool = False
    late: bool = False


def run_apart(function: Callable[[], Any], cpu_seconds: int = CPU_SECONDS, wall: float = WALL_SECONDS) -> Outcome:
    """What ``function`` returns, as JSON has it, computed in a copy of this process that computes for ``cpu_seconds``
    at most. An exception is its failure."""
    if not hasattr(os, "fork"):
        return Outcome(failure="this system cannot fork a process to try it in")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Threads of the parent (torch's, gloo's) are not in the copy, which starts none and takes no lock of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reader)
        _child(function, writer, cpu_seconds)
    os.close(writer)
    try:
        data, late = _read(reader, wall)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return _outcome(data, status, late, cpu_seconds, wall)


def _child(function: Callable[[], Any], writer: int, cpu_seconds: int) -> None:
    """Never returns: the copy must not go on with its parent's work."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Workers of a pool that the parent has started are not there: a second thread would wait for them for ever.
        torch.set_num_threads(1)
        try:
            answer = {"value": function()}
        except Exception as error:
            answer = {"failure": f"{type(error).__name__}: {error}".strip()[:500]}
        left = json.dumps(answer).encode()
        while left:
            left = left[os.write(writer, left) :]
    finally:
        os._exit(0)


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
    what = signal.Signals(ended).name if ended else f"exit code {os.waitstatus_to_exitcode(status)}"
    return Outcome(failure=f"it ended the process ({what})", crash=True)
