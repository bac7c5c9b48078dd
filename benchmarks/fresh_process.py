"""Measures a case in a process of its own, so that nothing of another case is loaded, kept or counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any


def measured_apart(module: str, *words: str) -> dict[str, Any] | None:
    """The figures that ``python -m module words`` prints, as JSON on its last line; None if its limit of processor
    seconds stopped it. Plans are made on one thread, and none that was kept is taken, since it takes no time. Raises
    RuntimeError if it fails, after its own message."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "AUTOPAR_CACHE": "off"}
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed with status {done.returncode}; its traceback stands above")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
