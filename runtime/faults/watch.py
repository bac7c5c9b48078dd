"""Watches over the collective calls of this process, so that a fault on any rank ends on every rank with one message.

A call says that it begins and ends (:meth:`Watch.call`), which costs a microsecond. A thread looks about once a second
where the process is, and tells the first rank (:mod:`.hub`), which says whether something is wrong. Then all
communication of this process is interrupted, and the call that waits raises :class:`FaultError`. A process that does
not get that far, since it is elsewhere or cannot be interrupted, prints the message and ends.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch.distributed as dist

from autopar.errors import AutoparError, ExecutionError, FaultError, IndexRangeError
from autopar.runtime.torch_internals.interrupt import interrupt_communication, ranks_store

from .addresses import own_addresses
from .deputies import INTERRUPT
from .diagnosis import CAUSE, LENIENCE, STILL
from .hub import Hub
from .link import Link, Silence
from .meeting import await_all
from .pace import INTERVAL, interval_of
from .process_state import STOPPED, state_of
from .record import Record, State
from .stack import NOWHERE, Stillness, Thread, innermost_frames, is_communication_file, place_in, place_of

# Seconds that a process may take to raise the error, or to leave, once all know of a fault.
# Chosen: enough to unwind a step.
_LEAVE_SECONDS = 10.0
# Intervals to wait for the hub's word on a communication that failed.
# Chosen: longer than the hub takes.
_VERDICT = CAUSE + STILL
# How many predicted steps a rank may take for one.
# Chosen: predictions are not off by more (docs/cost-model.md).
_STEPS = 4.0
# The longest note about an error.
# Chosen: a line.
_NOTE = 300


class Watch:
    """The watch over the calls that ``ranks`` make together; see :func:`watch_over`."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self._interval = interval_of(len(ranks))
        self.fault = ""
        self._record = Record(where=_own_place(), timeout=0.0)
        self._everyone = not dist.is_initialized() or len(ranks) == dist.get_world_size()
        self._hub_where = ""
        self._thread = Thread.here()
        self._inside = False
        self._still = Stillness(self._interval)
        self._known = threading.Event()
        self._left = False
        self._faulty_since: float | None = None
        self._link: Link | None = None
        self._hub: Hub | None = None

    @property
    def active(self) -> bool:
        """Whether others hear of this rank."""
        return self._link is not None

    def allow(self, seconds: float) -> None:
        """Lets others wait for this rank for at least that many seconds: as long as one of the models of these ranks
        allows."""
        self._record = replace(self._record, timeout=max(self._record.timeout, seconds))

    def expect(self, plan: object) -> None:
        """Lets others wait for at least a few steps of ``plan``, as it predicts them."""
        seconds = getattr(getattr(plan, "predicted", None), "step_seconds", 0.0)
        if self._record.timeout:
            self.allow(_STEPS * seconds)

    def call(self, name: str) -> AbstractContextManager[None]:
        """A collective call, which may contain others. Raises :class:`FaultError` instead of what a fault made it
        raise."""
        return nullcontext() if self._link is None or self._inside else _Call(self, name)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """A part of a call for which the others wait patiently."""
        self._record = replace(self._record, planning=True)
        try:
            yield
        finally:
            self._record = replace(self._record, planning=False)

    def begin(self, name: str) -> None:
        """The beginning of a call."""
        if self.fault:
            self._raise()
        self._inside, self._thread = True, Thread.here()
        record = self._record
        self._record = replace(record, number=record.number + 1, name=name, state="running", note="")

    def finish(self, error: BaseException | None) -> None:
        """The end of a call, by ``error`` if there is one, which :class:`FaultError` replaces where that is the
        cause."""
        try:
            if error is not None:
                self._failed(error)
        finally:
            self._inside = False
            self._record = replace(self._record, name="", planning=False)

    def _failed(self, error: BaseException) -> None:
        """Tells the others, or learns from them what the cause was."""
        if self.fault and isinstance(error, Exception):
            self._raise(error)
        if isinstance(error, Exception) and _is_communication(error):
            self.report("broken", error)
            self._known.wait(_VERDICT * self._interval)
            place = self._record.place
            self.fault = self.fault or f"the communication of rank {self.rank} failed {place}: {self._record.note}"
            self._raise(error)
        if not _is_raised_everywhere(error):
            # The caller may catch it and go on: only its end is final (the hook, or the connection).
            self._record = replace(self._record, note=_note(error))

    def _raise(self, error: BaseException | None = None) -> None:
        self._left = True
        raise FaultError(self.fault) from error

    def report(self, state: State, error: BaseException | None = None) -> None:
        """Tells the others at once in what state this process is."""
        note = self._record.note if error is None else _note(error)
        place = NOWHERE if error is None else place_in(error.__traceback__)
        line, instruction = place.line, place.instruction
        self._record = replace(self._record, state=state, note=note, waits=True, line=line, instruction=instruction)
        if self._link is not None:
            self._link.send_now(INTERVAL)

    def _look(self) -> Record:
        """What the thread sends."""
        record = self._record
        if record.state != "running":
            return record
        place = place_of(self._thread.ident)
        self._still.look(self._thread, record.number, place)
        still, line, instruction = self._still.seconds, place.line, place.instruction
        # Outside of calls it may wait for ranks that this watch does not know, unless it knows all.
        waits = place.waits and (bool(record.name) or self._everyone)
        return replace(record, waits=waits, still=still, line=line, instruction=instruction)

    def _hear(self, fault: str, hub: Silence) -> None:
        """What the thread heard."""
        record = self._look()
        if (
            not fault
            and self._hub is None
            and record.name
            and (record.state == "broken" or record.still >= STILL * self._interval)
        ):
            fault = self._about_hub(hub, record)
        if fault and self._faulty_since is None:
            self.fault, self._faulty_since = fault, time.monotonic()
            self._known.set()
            if not self._left:
                # On its own: aborting NCCL may block, and this thread must be able to end the process.
                threading.Thread(target=_interrupt, name=INTERRUPT, daemon=True).start()
        if self._faulty_since is None or self._left:
            return
        if time.monotonic() - self._faulty_since > _LEAVE_SECONDS:
            print(f"autopar: {self.fault}\nautopar: rank {self.rank} ends", file=sys.stderr, flush=True)
            os._exit(1)

    def _about_hub(self, hub: Silence, record: Record) -> str:
        """The fault if the first rank, which would say what is wrong, is silent itself."""
        first, waits = self.ranks[0], f"others wait for it, rank {self.rank} {record.place}"
        if hub.seconds == float("inf"):
            if hub.ended is None:
                return f"rank {first} ended, killed or by an error of its own; {waits}"
            if record.number <= hub.ended and record.still < record.timeout:
                return ""  # A call that the first rank has left: another rank is slow.
            return f"the script of rank {first} came to its end after {hub.ended} collective calls; {waits}"
        stopped = state_of(self._hub_where, socket.gethostname()) in STOPPED
        if hub.seconds >= record.timeout * (LENIENCE if hub.reached and not stopped else 1):
            return f"rank {first} does not answer: it is stopped, or cut off; {waits} since {record.still:.0f} s"
        return ""

    def start(self) -> None:
        """Meets the other ranks through their store. Raises :class:`FaultError` if some do not come in time."""
        store = ranks_store(f"autopar/watch/{'-'.join(map(str, self.ranks))}/{_count(self.ranks)}")
        if self.rank == self.ranks[0]:
            token = secrets.token_hex()
            self._hub = Hub(self.ranks, token, socket.gethostname())
            store.set("hub", "\n".join([str(self._hub.port), token, self._record.where, *own_addresses()]))
        await_all(store, self.ranks, self.rank, self._record.timeout)
        port, token, self._hub_where, *addresses = store.get("hub").decode().split("\n")
        hello = f'{{"rank": {self.rank}, "token": "{token}"}}'
        try:
            self._link = Link(addresses, int(port), hello, self._look, self._hear, self._interval)
        except OSError as error:
            print(
                f"autopar: rank {self.rank} cannot reach rank {self.ranks[0]} at {', '.join(addresses)} port {port} "
                f"({error}): faults of other ranks will not be named, and may take the process group's timeout",
                file=sys.stderr,
            )
            return
        _at_the_end(self)

    def abandon(self) -> None:
        """Drops the connections in a fork of this process."""
        link, hub, self._link, self._hub = self._link, self._hub, None, None
        for each in (link, hub):
            if each is not None:
                each.abandon()

    def end(self) -> None:
        """Called when the interpreter ends."""
        if self._link is not None and self._record.state == "running":
            self.report("ended")
        if self._hub is not None:
            failed = self._record.state == "failed"
            self._hub.close(self._record.number, f"rank {self.rank} failed: {self._record.note}" if failed else "")


class _Call:
    """One call of ``watch``."""

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._watch.begin(self._name)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._watch.finish(error)


# By ranks: how many watches there have been, and the one of the present world.
_COUNTS: dict[tuple[int, ...], int] = {}
_WATCHES: dict[tuple[int, ...], tuple[Any, Watch]] = {}


def _count(ranks: tuple[int, ...]) -> int:
    _COUNTS[ranks] = _COUNTS.get(ranks, -1) + 1
    return _COUNTS[ranks]


def watch_over(ranks: tuple[int, ...], timeout: float) -> Watch:
    """The watch over the calls of ``ranks`` in this world, created collectively at first. ``timeout``: the seconds
    for which ranks may wait for each other, if no other model of theirs allows more; 0: no watch, and no change to the
    others'. Raises :class:`FaultError` if ranks do not come in time."""
    world, watch = _WATCHES.get(ranks, (None, None))
    if timeout <= 0 or len(ranks) < 2:
        return Watch(ranks, dist.get_rank() if dist.is_initialized() else 0)
    if watch is None or world is not dist.group.WORLD:
        watch = Watch(ranks, dist.get_rank())
        watch.allow(timeout)
        watch.start()
        _WATCHES[ranks] = dist.group.WORLD, watch
    watch.allow(timeout)
    return watch


def _interrupt() -> None:
    with suppress(Exception):
        interrupt_communication()


def _own_place() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_communication(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, was raised while communicating."""
    for cause in _causes(error):
        # Not the innermost file alone: torch dispatches a wait through some of its own.
        files = [frame.f_code.co_filename for frame in innermost_frames(cause.__traceback__)]
        foreign = isinstance(cause, RuntimeError) and not isinstance(cause, AutoparError)
        if foreign and any(map(is_communication_file, files)):
            return True
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error``, and what caused it, each once: an error may have been raised from itself."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _is_raised_everywhere(error: BaseException) -> bool:
    """Whether ranks agreed to raise it: all of autopar's errors but those of one instruction."""
    return isinstance(error, IndexRangeError) or (
        isinstance(error, AutoparError) and not isinstance(error, ExecutionError)
    )


def _note(error: BaseException) -> str:
    """The error in a line."""
    causes = list(_causes(error))
    error = next((each for each in causes if not isinstance(each, AutoparError)), causes[-1])
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}{text and f': {text}'}"[:_NOTE]


def _at_the_end(watch: Watch) -> None:
    """Lets ``watch`` tell the others how this process ends."""
    atexit.register(watch.end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=watch.abandon)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        before(kind, error, trace)
        if watch.fault and not isinstance(error, FaultError):
            print(f"autopar: {watch.fault}", file=sys.stderr)
        elif not isinstance(error, FaultError):
            watch.report("failed", error)

    sys.excepthook = hook
