"""Injects faults into a training on four gloo ranks, and measures how long every rank takes to end and what it says.

``python -m benchmarks.faults [--only TEXT] [--hosts]`` writes ``benchmarks/results/faults.json``: for each fault the
seconds until the last process has gone (the launcher included) and the first line that names the cause. ``--hosts``
(root, ``ip`` and ``tc``) freezes the network between two emulated hosts instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from .emulated_hosts import emulated_hosts, freeze, start_on_hosts

RESULTS = Path(__file__).with_name("results")
SCRIPT = Path(__file__).with_name("fault_training.py")
# ``Options(timeout=)`` of the runs, in seconds: 60 would only make them longer.
TIMEOUT = 10.0
# A rank that has not ended by then hangs.
LIMIT = 150.0
WHOLE, STAGES = {"zero": 3}, {"stages": 2, "microbatches": 2}
EVERYWHERE = ("SIGKILL", "SIGSTOP", "full_tensor", "batch shape", "dtype", "evaluation mode", "frozen", "evaluation")
ONCE = (
    "SIGSEGV", "os._exit", "exception", "MemoryError", "sys.exit(0)", "fewer batches", "sleep", "DTensor.full_tensor",
    "full_params", "clip_grad_norm_", "late", "deeper", "wider", 'options {"zero": 1}', 'options {"precision": "bf16"}',
    'options {"timeout": 30}',
)  # fmt: skip
# Of the rank with the hub, which names the others' faults.
FIRST = tuple(f"{fault} of rank 0" for fault in ("SIGKILL", "SIGSTOP", "exception", "full_tensor"))
LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
# The last line of a traceback of a rank, or what the watch prints.
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: )?((?:autopar\.errors\.)?\w*(?:Error|Exit): .*|autopar: .*|Fatal Python error.*)$"
)


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def inject(fault: str, options: dict[str, object], to_launcher: signal.Signals | None = None) -> dict[str, object]:
    """One run; its row."""
    with tempfile.TemporaryDirectory() as name:
        folder, settings = Path(name), json.dumps({**options, "timeout": TIMEOUT})
        command = ["run", "--nproc", "4", str(SCRIPT), fault, settings, name]
        with (folder / "log").open("w") as log:
            launcher = subprocess.Popen([sys.executable, "-m", "autopar", *command], stdout=log, stderr=log)
        return row(folder, [launcher], lambda: None if to_launcher is None else launcher.send_signal(to_launcher))


def freeze_a_host() -> dict[str, object]:
    """Two hosts of two ranks, of which the second is cut off; its row. The launchers are not waited for: torch's wait
    for each other."""
    with tempfile.TemporaryDirectory() as name, emulated_hosts(2, 1000):
        folder, settings = Path(name), json.dumps({**WHOLE, "timeout": TIMEOUT})
        with (folder / "log").open("w") as log:
            launchers = start_on_hosts(2, 2, [str(SCRIPT), "none", settings, name], log)
        return row(folder, launchers, lambda: freeze(1), launchers_too=False)


def row(
    folder: Path, launchers: list[subprocess.Popen[bytes]], fault: Callable[[], None], launchers_too: bool = True
) -> dict[str, object]:
    """Waits until the training has begun and has had its ``fault``, and then for its end."""
    deadline = time.monotonic() + LIMIT
    while not (folder / "began").exists() and launchers[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    begin = time.monotonic()
    fault()
    pids = [int(file.read_text()) for file in folder.glob("pid*")]
    pids += [launcher.pid for launcher in launchers] if launchers_too else []
    while time.monotonic() < begin + LIMIT:
        if not any(map(alive, pids)) and not (launchers_too and launchers[0].poll() is None):
            break
        time.sleep(0.02)
    seconds, left = time.monotonic() - begin, [pid for pid in pids if alive(pid)]
    for pid in (*left, *(launcher.pid for launcher in launchers if launcher.poll() is None)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for launcher in launchers:
        launcher.wait()
    return {"seconds": round(seconds, 1), "left_behind": len(left), "said": _said((folder / "log").read_text())}


def _said(log: str) -> str:
    """The line that names the cause: that of the watch, another one of autopar, or the first error of any rank."""
    lines = [line for line in log.splitlines() if not line.endswith(("(no error so far)", "yet; the others wait"))]
    found = [match[1] for line in lines if (match := _ERROR.match(line))]
    named = [line for text in ("FaultError", "autopar") for line in found if text in line]
    return next(iter(named or found), "").replace("autopar.errors.", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults with this text in their name")
    parser.add_argument("--hosts", action="store_true", help="a frozen network between two emulated hosts")
    arguments = parser.parse_args()
    runs: dict[str, Callable[[], dict[str, object]]] = {
        f"{fault}{suffix}": partial(inject, fault, dict(options))
        for suffix, options, faults in (("", WHOLE, (*EVERYWHERE, *ONCE, *FIRST)), (", stages", STAGES, EVERYWHERE))
        for fault in faults
    }
    runs |= {f"{number.name} to the launcher": partial(inject, "none", dict(WHOLE), number) for number in LAUNCHER}
    if arguments.hosts:
        runs = {"network between two hosts frozen": freeze_a_host}
    path = RESULTS / "faults.json"
    rows = json.loads(path.read_text())["faults"] if path.exists() else {}
    for name, run in runs.items():
        if arguments.only in name:
            rows[name] = run()
            print(f"{name:32} {rows[name]['seconds']:6} s  {rows[name]['said']}", flush=True)
            path.write_text(json.dumps({"timeout": TIMEOUT, "ranks": 4, "faults": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
