"""Says on a terminal what a first step is waiting for: tracing, planning, compiling.

The first process of a job writes one line for each phase, which stays, with its seconds, if it took long. Where
standard error is no terminal, nothing is written; the logger ``autopar.progress`` has the same at level INFO.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds from which on the line of a phase stays. Chosen: what people notice.
LONG = 0.5
_log = logging.getLogger(__name__)


@contextmanager
def shown(phase: str) -> Iterator[None]:
    """Shows ``phase`` ("tracing the model") while the body runs. Also a decorator."""
    start = time.perf_counter()
    is_shown = os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    if is_shown:
        _write(f"autopar: {phase} …")
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        if is_shown:
            _write(f"autopar: {phase}  {seconds:.1f} s\n" if seconds >= LONG else "")
        _log.info("%s  %.1f s", phase, seconds)


def _write(line: str) -> None:
    """Writes over the line that the cursor is in."""
    sys.stderr.write(f"\r\x1b[K{line}")
    sys.stderr.flush()
