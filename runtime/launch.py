"""Runs a function on several local processes, as ranks of one torch.distributed world.

Ranks are copies of a template process that has imported torch and the modules that the function refers to
(:mod:`autopar.processes`), or new processes. The function is sent by cloudpickle, so closures work. The parent serves
the rendezvous store on a separate port, so that runs do not interfere. If a rank raises, dies or hangs, the run ends:
the others are killed, all processes are waited for, and the error shows where that rank was.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TypeVar

import cloudpickle
import torch
import torch.distributed as dist

from autopar.errors import AutoparError, OptionsError, WorkerError
from autopar.processes.child import Child, own_child
from autopar.processes.payload import Payload, open_payload, payload
from autopar.processes.template import start as start_process

Result = TypeVar("Result")
Start = Literal["auto", "template", "spawn"]

# Seconds to wait for further reports after the first failure: the cause may report after its consequences.
# Chosen, not measured.
_SETTLE_SECONDS = 0.3
# Seconds that a process with closed descriptors may take to end (it may be writing a core file).
# Chosen, not measured.
_DYING_SECONDS = 5.0
# A 64-bit integer.
_PORT_BYTES = 8
# From Linux's sys/prctl.h.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Task:
    """The task of all ranks; ``traces``: the folder with a trace file for each."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world: int
    threads: int
    backend: str | None
    traces: str


@dataclass(frozen=True)
class _Report:
    """The report of one rank: its result, or its error as an object (if that can be sent) and as text. ``time`` orders
    reports of all ranks."""

    time: float
    result: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass
class _Worker:
    """The parent's record of a rank."""

    rank: int
    process: Child
    pipe: int
    trace: Path
    data: bytearray = field(default_factory=bytearray)
    report: _Report | None = None
    open: bool = True
    may_die: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Its wait status, None while it runs."""
        return self.process.poll()

    def read(self) -> bool:
        """Reads the pipe; False at its end."""
        chunk = os.read(self.pipe, 1 << 20)
        self.data += chunk
        return bool(chunk)

    def finish(self) -> None:
        """Called at the end of the pipe: unpacks the report."""
        self.open = False
        if self.data and self.report is None:
            self.report = cloudpickle.loads(bytes(self.data))

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the rank and its children (it leads a process group of its own)."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)

    @property
    def dying(self) -> bool:
        """Whether its pipe closed without a report, but its status is not known yet: descriptors close first."""
        return not self.open and self.report is None and self.status is None

    @property
    def failed(self) -> bool:
        if self.report is not None:
            return self.report.error is not None or bool(self.report.trace)
        return not self.may_die and (not self.open or self.status is not None)

    @property
    def done(self) -> bool:
        """Whether nothing more is expected of it, and nothing is wrong."""
        return not self.failed and (self.report is not None or (self.may_die and not self.open))


def run_local(
    function: Callable[..., Result],
    nprocs: int,
    *,
    timeout: float,
    args: Sequence[Any] = (),
    backend: str | None = "gloo",
    start: Start = "auto",
    may_die: bool = False,
) -> list[Result]:
    """Runs ``function(rank, nprocs, *args)`` on ``nprocs`` local processes. Returns the results by rank. ``may_die``:
    a process that is killed or exits leaves the others alone, and its result is None
    (``Options(sync=...(patience=))``).

    The process group is initialised with ``backend`` (None: only the environment is set, as by torchrun). Each rank
    gets its share of the cores. ``timeout``: seconds after the processes have started. The function and the results are
    sent by cloudpickle; tensors are fine.

    Raises :class:`WorkerError` with the traceback of the rank that raised, died or hung. An :class:`AutoparError` of a
    rank is raised unchanged, with that rank's traceback as a note.
    """
    if nprocs < 1:
        raise OptionsError(f"run_local needs at least one process, got {nprocs}")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="autopar-"))
        threads = max(1, (os.cpu_count() or 1) // nprocs)
        sent = stack.enter_context(payload(_Task(function, tuple(args), nprocs, threads, backend, folder)))
        door, knock = os.pipe()
        stack.callback(os.close, door)
        stack.callback(os.close, knock)
        begin = _spawn if _starts_afresh(start) else _copy
        workers: list[_Worker] = []
        stack.callback(_end, workers)
        for rank in range(nprocs):
            workers.append(_begin(begin, sent, door, rank, Path(folder)))
            workers[-1].may_die = may_die
        deadline = time.monotonic() + timeout
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        os.write(knock, store.port.to_bytes(_PORT_BYTES, "little") * nprocs)
        _listen(workers, deadline)
        if not all(worker.done for worker in workers):
            _raise(workers, timeout)
        results: list[Any] = [None if worker.report is None else worker.report.result for worker in workers]
        return results


def _starts_afresh(start: Start) -> bool:
    return start == "spawn" or not hasattr(os, "fork")


def _begin(
    begin: Callable[[Payload, Sequence[int], int], Child], sent: Payload, door: int, rank: int, folder: Path
) -> _Worker:
    reading, writing = os.pipe()
    try:
        process = begin(sent, (door, writing), rank)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(process.pid, process.pid)
    return _Worker(rank, process, reading, _trace_file(folder, rank))


def _trace_file(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"rank{rank}")


def _copy(sent: Payload, pipes: Sequence[int], rank: int) -> Child:
    return start_process("autopar.runtime.launch:work", sent, pipes, (rank,))


def _spawn(sent: Payload, pipes: Sequence[int], rank: int) -> Child:
    descriptors = (sent.descriptor, *pipes)
    arguments = ", ".join(map(str, (*descriptors, rank)))
    process = subprocess.Popen(
        [sys.executable, "-c", f"from autopar.runtime.launch import work; work({arguments})"],
        stdin=subprocess.DEVNULL, pass_fds=descriptors, process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    process.returncode = 0  # The parent waits for it by its id, not by this object.
    return own_child(process.pid)


def work(descriptor: int, door: int, pipe: int, rank: int) -> NoReturn:
    """The main function of a rank: reads the store's port from ``door``, runs the task, and writes its report to
    ``pipe``. It then waits to be killed, so that its connections stay open until all ranks are done."""
    os.register_at_fork(after_in_child=partial(_leave_to_parent, pipe, os.getpid()))
    try:
        try:
            task: _Task = open_payload(descriptor)
        except Exception as error:
            _tell(pipe, _Report(time.monotonic(), None, error, traceback.format_exc()))
        with open(_trace_file(task.traces, rank), "w") as trace:
            _settle_in(task, door, rank, trace)
            report = _attempt(task, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        _tell(pipe, report)
    finally:
        os._exit(1)


def _leave_to_parent(pipe: int, rank: int) -> None:
    """Closes ``pipe`` in a process that a rank starts, such as a worker of a loader: the report is complete when nobody
    has it open."""
    if os.getppid() == rank:
        os.close(pipe)


def _tell(pipe: int, report: _Report) -> NoReturn:
    with open(pipe, "wb") as stream:
        stream.write(_pack(report))
    while True:
        signal.pause()


def _attempt(task: _Task, rank: int) -> _Report:
    try:
        torch.set_num_threads(task.threads)
        if task.backend is not None:
            dist.init_process_group(task.backend)
        result = task.function(rank, task.world, *task.args)
        return _Report(time.monotonic(), result)
    except BaseException as error:
        return _Report(time.monotonic(), None, error, traceback.format_exc())


def _settle_in(task: _Task, door: int, rank: int, trace: IO[str]) -> None:
    # Ranks are killed if the parent dies.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(PermissionError):
        os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
    port = int.from_bytes(os.read(door, _PORT_BYTES), "little")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task.world),
        LOCAL_WORLD_SIZE=str(task.world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip


def _pack(report: _Report) -> bytes:
    try:
        packed = cloudpickle.dumps(report)
        if report.error is not None:
            cloudpickle.loads(packed)  # Some exceptions can be sent but not received.
        return bytes(packed)
    except Exception as error:
        if report.error is not None:
            return bytes(cloudpickle.dumps(_Report(report.time, None, None, report.trace)))
        text = f"{traceback.format_exc()}\nthe result of this rank cannot be sent to the parent: {error}"
        return bytes(cloudpickle.dumps(_Report(report.time, None, None, text)))


def _listen(workers: list[_Worker], deadline: float) -> None:
    """Reads until every rank has reported, or shortly after one failed, or to the deadline."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
        while any(worker.open for worker in workers) and time.monotonic() < deadline:
            for key, _ in selector.select(min(0.05, max(0.0, deadline - time.monotonic()))):
                if not key.data.read():
                    selector.unregister(key.data.pipe)
                    key.data.finish()
            if any(worker.failed for worker in workers):
                deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)


def _raise(workers: list[_Worker], timeout: float) -> NoReturn:
    """Raises the error of the rank that failed first; deaths come before exceptions, since peers of a dead rank
    raise."""
    world = len(workers)
    patience = time.monotonic() + _DYING_SECONDS
    while any(worker.dying for worker in workers) and time.monotonic() < patience:
        time.sleep(0.01)
    dead = [w for w in workers if w.report is None and w.status is not None and not w.may_die]
    if dead:
        raise WorkerError(f"rank {dead[0].rank} of {world} {_cause_of_death(dead[0])}")
    raised = [(w.report.time, w.rank, w.report) for w in workers if w.report is not None and w.failed]
    if raised:
        _, rank, report = min(raised, key=lambda entry: entry[:2])
        note = f"rank {rank} of {world} raised:\n\n{report.trace}"
        if isinstance(report.error, AutoparError):
            report.error.add_note(note)
            raise report.error
        raise WorkerError(note)
    stuck = [worker for worker in workers if worker.report is None and not worker.done]
    for worker in stuck:
        worker.signal(signal.SIGUSR1)
    # Chosen: the time to write the traces.
    time.sleep(0.2)
    places = "\n".join(f"rank {worker.rank} was here:\n{_read_trace(worker)}" for worker in stuck)
    names = ", ".join(str(worker.rank) for worker in stuck)
    raise WorkerError(f"no result from rank {names} of {world} within {timeout:g} s\n\n{places}")


def _read_trace(worker: _Worker) -> str:
    return worker.trace.read_text() if worker.trace.exists() else ""


def _cause_of_death(worker: _Worker) -> str:
    status = worker.status or 0
    trace = _read_trace(worker)
    where = f"; it was here:\n{trace}" if trace else ""
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        hint = " (often: the machine ran out of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}{where}"
    return f"exited with status {os.waitstatus_to_exitcode(status)} without a result{where}"


def _end(workers: list[_Worker]) -> None:
    """Kills every rank, waits for it and closes its pipe."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.process.poll(block=True)
        os.close(worker.pipe)
