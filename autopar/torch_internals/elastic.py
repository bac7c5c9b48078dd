"""Torch's elastic launcher, in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

# Those on which the launcher ends its processes (``--signals-to-handle``), and which it replaces for good.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(options: Sequence[str], command: Sequence[str], grace: int) -> tuple[int, str]:
    """Runs ``command`` by ``torch.distributed.run`` with ``options`` until the last process has ended. Returns an exit
    status (0, 1, or 128 and the signal that ended the launcher) and what to say of it.

    ``grace``: the seconds between SIGTERM and SIGKILL of a process; the launcher's own 30 are an argument that nothing
    passes on. A stopped process is continued, or it would not receive SIGTERM. Relies on ``PContext.close(death_sig,
    timeout)`` and ``SubprocessHandler.close(death_sig)`` (2.11)."""
    with _patient(grace), _signals_restored():
        try:
            arguments = torch_run.parse_args([*options, "--no-python", command[0]])
            # Not parsed: a script's own ``--log`` would be an abbreviation of several of torch's options.
            arguments.training_script_args = list(command[1:])
            torch_run.run(arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"failed ({failure.exitcode})"
            return 1, f"autopar: rank {rank} (process {failure.pid}) {how} first, and the others were ended\n{error}"
        except SignalException as error:
            return 128 + int(error.sigval), f"ended by {signal.Signals(error.sigval).name}"
    return 0, ""


@contextmanager
def _patient(grace: int) -> Iterator[None]:
    close, end = PContext.close, SubprocessHandler.close

    def close_after(self: PContext, death_sig: Any = None, timeout: int = grace) -> None:
        close(self, death_sig, grace)

    def end_stopped(self: SubprocessHandler, death_sig: Any = None) -> None:
        end(self, death_sig)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.proc.pid, signal.SIGCONT)

    PContext.close, SubprocessHandler.close = close_after, end_stopped  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.close, SubprocessHandler.close = close, end  # type: ignore[method-assign]


@contextmanager
def _signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
