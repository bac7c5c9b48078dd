"""Runs a function on several local processes, as ranks of one torch.distributed world.

Ranks are forked where that is safe (no second import of torch; closures work), else started afresh with the
function sent by cloudpickle. The parent serves the rendezvous store on a port of its own, so no two runs
meet; it starts to serve only when all ranks are forked, because a fork beside a busy server thread inherits
whatever lock that thread holds. A rank that raises, dies or hangs ends the run: the others are killed, every
process is reaped, and the error shows where that rank was.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TypeVar

import cloudpickle
import torch
import torch.distributed as dist

from autopar.errors import AutoparError, OptionsError, WorkerError

Result = TypeVar("Result")
Start = Literal["auto", "fork", "spawn"]

# How long after the first failure others are still listened to: the cause may report after its consequences.
_SETTLE_SECONDS = 0.3
# How long a process whose descriptors are closed may take to end (it may be writing a core file).
_DYING_SECONDS = 5.0
_PORT_BYTES = 8
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Task:
    """What one rank is told. It reads the store's port from the descriptor ``door``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world: int
    door: int
    threads: int
    backend: str | None
    trace: str


@dataclass(frozen=True)
class _Report:
    """What one rank says: its result, or its error as an object (if that can be sent) and as text. ``time``
    orders reports of all ranks."""

    time: float
    result: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass
class _Worker:
    """A rank as the parent sees it. ``status`` is its wait status once reaped."""

    rank: int
    pid: int
    pipe: int
    trace: Path
    data: bytearray = field(default_factory=bytearray)
    report: _Report | None = None
    open: bool = True
    status: int | None = None

    def reap(self, block: bool = False) -> None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
            self.status = status if pid else None

    def read(self) -> bool:
        """Takes what the pipe holds; False at its end."""
        chunk = os.read(self.pipe, 1 << 20)
        self.data += chunk
        return bool(chunk)

    def finish(self) -> None:
        """The pipe is at its end: whatever came is the report."""
        self.open = False
        if self.data and self.report is None:
            self.report = cloudpickle.loads(bytes(self.data))

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """The rank and whatever it started (it leads a process group of its own)."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)

    @property
    def dying(self) -> bool:
        """Its pipe closed without a report, but it cannot be reaped yet: descriptors go first."""
        return not self.open and self.report is None and self.status is None

    @property
    def failed(self) -> bool:
        if self.report is not None:
            return self.report.error is not None or bool(self.report.trace)
        return not self.open or self.status is not None


def run_local(
    function: Callable[..., Result],
    nprocs: int,
    *,
    timeout: float,
    args: Sequence[Any] = (),
    backend: str | None = "gloo",
    start: Start = "auto",
) -> list[Result]:
    """``function(rank, nprocs, *args)`` on ``nprocs`` local processes; the results by rank.

    The process group is initialised with ``backend`` (None: only the environment is set, as by torchrun).
    Each rank gets its share of the cores. ``timeout`` is in seconds, for everything. Results are sent by
    cloudpickle; tensors are fine.

    Raises :class:`WorkerError` with the traceback of the rank that raised, died or hung; an
    :class:`AutoparError` of a rank is raised as it is, with that rank's traceback as a note.
    """
    if nprocs < 1:
        raise OptionsError(f"run_local needs at least one process, got {nprocs}")
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autopar-")))
        servers: list[object] = []
        stack.callback(servers.clear)
        door, knock = os.pipe()
        stack.callback(os.close, door)
        stack.callback(os.close, knock)
        threads = max(1, (os.cpu_count() or 1) // nprocs)
        begin = _spawn if _starts_afresh(start) else _fork
        workers: list[_Worker] = []
        stack.callback(_end, workers)
        for rank in range(nprocs):
            trace = str(folder / f"rank{rank}")
            task = _Task(
                function=function,
                args=tuple(args),
                rank=rank,
                world=nprocs,
                door=door,
                threads=threads,
                backend=backend,
                trace=trace,
            )
            workers.append(begin(task))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        os.write(knock, store.port.to_bytes(_PORT_BYTES, "little") * nprocs)
        servers.append(store)
        del store
        _listen(workers, deadline)
        if any(worker.report is None or worker.failed for worker in workers):
            _raise(workers, timeout)
        return [worker.report.result for worker in workers if worker.report is not None]


def _starts_afresh(start: Start) -> bool:
    """Neither a CUDA context nor a process group survives a fork."""
    if start == "auto":
        return torch.cuda.is_initialized() or dist.is_initialized() or not hasattr(os, "fork")
    return start == "spawn"


def _fork(task: _Task) -> _Worker:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # The child calls nothing that needs another thread of the parent.
        warnings.filterwarnings("ignore", r".*multi-threaded, use of fork\(\)", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        # Collecting the parent's garbage here could wait for threads that only the parent has (stores,
        # process groups).
        gc.freeze()
        os.close(reading)
        _work(task, writing, forked=True)
    os.close(writing)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return _Worker(task.rank, pid, reading, Path(task.trace))


def _spawn(task: _Task) -> _Worker:
    reading, writing = os.pipe()
    code = f"from autopar.runtime.launch import work_from_stdin; work_from_stdin({writing})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=(writing, task.door), process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    os.close(writing)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(cloudpickle.dumps(task))
    process.returncode = 0  # The worker is reaped below by its id, not by this object.
    return _Worker(task.rank, process.pid, reading, Path(task.trace))


def work_from_stdin(pipe: int) -> NoReturn:
    """The life of a rank started afresh: its task comes on standard input, its report leaves on the
    descriptor ``pipe``."""
    _work(cloudpickle.loads(sys.stdin.buffer.read()), pipe, forked=False)


def _work(task: _Task, pipe: int, *, forked: bool) -> NoReturn:
    """The life of a rank; it ends in a wait to be killed, so that no peer sees its connections close before
    all are done."""
    try:
        with open(task.trace, "w") as trace:
            _settle_in(task, trace)
            report = _attempt_in_thread(task) if task.threads > 1 and forked else _attempt(task)
        sys.stdout.flush()
        sys.stderr.flush()
        with open(pipe, "wb") as stream:
            stream.write(_pack(report))
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _attempt(task: _Task) -> _Report:
    try:
        torch.set_num_threads(task.threads)
        if task.backend is not None:
            dist.init_process_group(task.backend)
        result = task.function(task.rank, task.world, *task.args)
        return _Report(time.monotonic(), result)
    except BaseException as error:
        return _Report(time.monotonic(), None, error, traceback.format_exc())


def _attempt_in_thread(task: _Task) -> _Report:
    """A forked child lacks the threads of its parent's OpenMP pool and would wait for them; a new thread gets
    a pool of its own."""
    reports: list[_Report] = []
    thread = threading.Thread(target=lambda: reports.append(_attempt(task)), name=f"rank {task.rank}")
    thread.start()
    thread.join()
    return reports[0]


def _settle_in(task: _Task, trace: IO[str]) -> None:
    # A parent that dies takes its ranks along.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(PermissionError):
        os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
    port = int.from_bytes(os.read(task.door, _PORT_BYTES), "little")
    os.environ.update(
        RANK=str(task.rank), LOCAL_RANK=str(task.rank), WORLD_SIZE=str(task.world),
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
            for worker in workers:
                worker.reap()
            if any(worker.failed for worker in workers):
                deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)


def _raise(workers: list[_Worker], timeout: float) -> NoReturn:
    """The error of the rank that failed first: a death before an exception, since peers of a dead rank
    raise."""
    world = len(workers)
    patience = time.monotonic() + _DYING_SECONDS
    while any(worker.dying for worker in workers) and time.monotonic() < patience:
        time.sleep(0.01)
        for worker in workers:
            worker.reap()
    dead = [w for w in workers if w.report is None and w.status is not None]
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
    stuck = [worker for worker in workers if worker.report is None]
    for worker in stuck:
        worker.signal(signal.SIGUSR1)
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
    """Kills and reaps every rank and closes its pipe."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.reap(block=True)
        os.close(worker.pipe)
