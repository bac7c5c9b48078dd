"""Injects faults into a training on four gloo ranks, and measures how long every rank takes to end and what it says.

``python -m benchmarks.faults [--only TEXT]`` writes ``benchmarks/results/faults.json``: for each fault the seconds
until the last process has gone (the launcher included) and the first line that names the cause.
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
from contextlib import suppress
from pathlib import Path

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
        folder = Path(name)
        settings = json.dumps({**options, "timeout": TIMEOUT})
        command = ["run", "--nproc", "4", str(SCRIPT), fault, settings, name]
        with (folder / "log").open("w") as log:
            launcher = subprocess.Popen([sys.executable, "-m", "autopar", *command], stdout=log, stderr=log)
        deadline = time.monotonic() + LIMIT
        while not (folder / "began").exists() and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        begin = time.monotonic()
        if to_launcher is not None:
            launcher.send_signal(to_launcher)
        pids = [launcher.pid, *(int(file.read_text()) for file in folder.glob("pid*"))]
        while (launcher.poll() is None or any(map(alive, pids))) and time.monotonic() < begin + LIMIT:
            time.sleep(0.02)
        seconds, left = time.monotonic() - begin, [pid for pid in pids if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        return {"seconds": round(seconds, 1), "left_behind": len(left), "said": _said((folder / "log").read_text())}


def _said(log: str) -> str:
    """The line that names the cause: that of autopar, else the first error of any rank."""
    found = [match[1] for line in log.splitlines() if (match := _ERROR.match(line))]
    return next((line for line in found if "autopar" in line), found[0] if found else "").replace("autopar.errors.", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults with this text in their name")
    only = parser.parse_args().only
    runs: list[tuple[str, str, dict[str, int], signal.Signals | None]] = [(f"{fault}{suffix}", fault, options, None)
            for suffix, options, faults in (("", WHOLE, (*EVERYWHERE, *ONCE)), (", stages", STAGES, EVERYWHERE))
            for fault in faults]  # fmt: skip
    runs += [(f"{number.name} to the launcher", "none", WHOLE, number) for number in LAUNCHER]
    path = RESULTS / "faults.json"
    rows = json.loads(path.read_text())["faults"] if path.exists() else {}
    for name, fault, options, number in runs:
        if only in name:
            rows[name] = inject(fault, dict(options), number)
            print(f"{name:32} {rows[name]['seconds']:6} s  {rows[name]['said']}", flush=True)
            path.write_text(json.dumps({"timeout": TIMEOUT, "ranks": 4, "faults": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
