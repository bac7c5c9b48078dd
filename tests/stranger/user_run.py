"""Runs a command as a user does from a shell, in a folder of its own, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# What a test session sets and a user's shell does not.
_NOT_THE_USERS = ("PYTHONPATH", "PYTHONWARNINGS", "PYTEST_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "CI")
_TOKEN = "AUTOPAR_TEST_RUN"
# How long after the last process was asked to end, or ended, others may take to follow.
_ENDING_SECONDS = 10.0


@dataclass(frozen=True)
class Ended:
    """``status`` is None if time ran out; ``left`` the processes that outlived the command."""

    status: int | None
    output: str
    left: tuple[int, ...]


def run_as_user(command: Sequence[str | Path], folder: Path, added: Mapping[str, str], timeout: float) -> Ended:
    """Runs ``command`` in ``folder`` with ``added`` in the environment for at most ``timeout`` seconds. All its
    processes are found by a mark in their environment: torchrun starts each rank as a session of its own."""
    token = uuid.uuid4().hex
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_THE_USERS)}
    environment = {**kept, **added, _TOKEN: token, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    log = folder / "output.log"
    with log.open("wb") as out:
        started = subprocess.Popen(
            [str(part) for part in command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    status: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            status = started.wait(timeout)
        left = _still_running(token) if status is not None else ()
    finally:
        _end(started, token, hung=status is None)
    return Ended(status, log.read_text(errors="replace"), left)


def _still_running(token: str) -> tuple[int, ...]:
    """The processes that remain when those that are ending have had time to."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while (running := tuple(_marked(token))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running


def _end(started: subprocess.Popen[bytes], token: str, hung: bool) -> None:
    """Kills what is left; ranks that hang first write where they are (the fault handler does on SIGABRT)."""
    if hung:
        for process in _marked(token):
            if process != started.pid:
                _signal(process, signal.SIGABRT)
        time.sleep(1.0)
    while running := list(_marked(token)):
        for process in running:
            _signal(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            started.wait(0.2)
    started.wait()


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _marked(token: str) -> Iterator[int]:
    mark = f"{_TOKEN}={token}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended meanwhile; one that only waits to be reaped has no environment
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
