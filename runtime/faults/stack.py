"""Where a thread is, read from its stack by another thread: it costs the thread nothing until somebody asks."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

import torch

from autopar.ops.index_range import PROGRAM_FILE
from autopar.runtime.execute.section_code import instruction_at

from .deputies import Deputies
from .pace import INTERVAL
from .process_state import bytes_moved, state_in
from .traffic import quiet_seconds

_RUNTIME = Path(__file__).parent.parent
_DISTRIBUTED = Path(torch.__file__).parent / "distributed"
# Where threads wait for other ranks: not all of torch.distributed, whose checkpoints and DTensors work alone as well.
_COMMUNICATION = (
    str(_RUNTIME / "comm"),
    str(_RUNTIME / "pipeline" / "point_to_point.py"),
    str(_DISTRIBUTED / "distributed_c10d.py"),
    str(_DISTRIBUTED / "_functional_collectives"),
)
_PACKAGE = Path(sys.modules["autopar"].__file__ or "").parent
_NOT_THE_USERS = (
    *(str(_PACKAGE.parent / name) for name in ("autopar", "passes", "cost")),
    str(_RUNTIME),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(torch.__file__).parent.parent),
    "<",
)
# How many of the innermost frames may lie between a communication and what it calls.
# Chosen: torch's own wrappers are four deep.
_NEAR = 8


@dataclass(frozen=True)
class Place:
    """``instruction``: of a program, "" if none runs; ``line``: the innermost of the user's; ``waits``: whether the
    thread communicates; ``key``: equal for two looks if the thread has not moved in between, as far as one can
    tell."""

    instruction: str
    line: str
    waits: bool
    key: int


NOWHERE = Place("", "", False, 0)


def place_of(thread: int) -> Place:
    """Where ``thread`` (its ``get_ident()``) is now; :data:`NOWHERE` if it has ended."""
    frame = sys._current_frames().get(thread)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _place([(each, each.f_lineno) for each in frames])


def place_in(trace: TracebackType | None) -> Place:
    """Where an error was raised, and who called that."""
    lines = [] if trace is None else [(frame, line) for frame, line in walk_stack(trace.tb_frame.f_back)]
    while trace is not None:
        lines.insert(0, (trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return _place(lines)


def _place(lines: Sequence[tuple[FrameType, int]]) -> Place:
    """``lines``: the innermost first."""
    if not lines:
        return NOWHERE
    instruction = next((text for frame, at in lines if (text := _instruction(frame, at))), "")
    users = [(frame, at) for frame, at in lines if not frame.f_code.co_filename.startswith(_NOT_THE_USERS)]
    line = f"{Path(users[0][0].f_code.co_filename).name}:{users[0][1]}" if users else ""
    waits = any(is_communication_file(frame.f_code.co_filename) for frame, _ in lines[:_NEAR])
    return Place(instruction, line, waits, hash(tuple((id(frame), frame.f_lasti) for frame, _ in lines)))


def innermost_frames(trace: TracebackType | None) -> list[FrameType]:
    """Of an error: the last few, in which a communication may lie."""
    return [frame for frame, _ in walk_tb(trace)][-_NEAR:]


def is_communication_file(file: str) -> bool:
    """Whether code of this ``file`` communicates."""
    return file.startswith(_COMMUNICATION)


def _instruction(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    return instruction_at(file, line) if file.startswith(PROGRAM_FILE) else ""


@dataclass(frozen=True)
class Thread:
    """A thread by its ``get_ident()`` and its number in the kernel, with the clock of the time it computes: asking for
    the clock of a thread that has ended would crash the process, but reading such a clock only fails."""

    ident: int
    number: int
    clock: int | None

    @classmethod
    def here(cls) -> Thread:
        """The thread that calls."""
        ident = threading.get_ident()
        clock = time.pthread_getcpuclockid(ident) if hasattr(time, "pthread_getcpuclockid") else None
        return cls(ident, threading.get_native_id(), clock)

    def seconds_computed(self) -> float:
        with suppress(OSError):
            return 0.0 if self.clock is None else time.clock_gettime(self.clock)
        return 0.0

    def bytes_moved(self) -> int:
        """Read and written, through system calls and to disks."""
        return bytes_moved(f"/proc/self/task/{self.number}")

    def waits_for_disk(self) -> bool:
        return state_in(f"/proc/self/task/{self.number}/stat") == "D"


class Stillness:
    """For how long a thread has been where it is, and nothing has worked for it: it waits for other ranks and no
    messages move, or it does not and neither it, nor other threads of Python, nor processes that it started, compute,
    read or write."""

    # A thread that computes this share of the time moves, even if every look finds it at the same place.
    # Chosen: a wait takes none.
    _BUSY = 0.05
    # Intervals between two looks that count, at most: if the whole process was stopped, the thread had no chance to
    # move.
    # Chosen.
    _MOST = 2.0

    def __init__(self, interval: float = INTERVAL) -> None:
        self.seconds, self._interval = 0.0, interval
        self._key: tuple[int, int] = (0, 0)
        self._looked = self._computed = 0.0
        self._moved = 0
        self._deputies = Deputies(interval)

    def look(self, thread: Thread, call: int, place: Place) -> None:
        """Looks at the ``thread``, which is at ``place`` in its collective call number ``call``."""
        now, key = time.monotonic(), (call, place.key)
        passed = now - self._looked
        self._looked = now
        moves = self._works(thread, passed) and place != NOWHERE and not place.waits
        self.seconds = 0.0 if key != self._key or moves else self.seconds + min(passed, self._MOST * self._interval)
        self._key = key
        if self.seconds == 0.0 or place == NOWHERE:
            return
        if place.waits:
            self.seconds = min(self.seconds, quiet_seconds())
        elif self._deputies.work(thread.number):
            self.seconds = 0.0

    def _works(self, thread: Thread, passed: float) -> bool:
        """Whether it computed, read or wrote in the seconds that have ``passed``."""
        computed, moved = thread.seconds_computed(), thread.bytes_moved()
        works = computed - self._computed > self._BUSY * passed or moved != self._moved or thread.waits_for_disk()
        self._computed, self._moved = computed, moved
        return works
