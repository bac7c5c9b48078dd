"""Where autopar keeps what it has measured, found out and made on this machine."""

from __future__ import annotations

import os
from pathlib import Path

OFF = "off"
# What is kept, one folder for each kind.
KEPT = ("traces", "plans", "rules")


def cache_folder() -> Path:
    """``$AUTOPAR_CACHE``, by default ``~/.cache/autopar``; it may not exist yet."""
    folder = os.environ.get("AUTOPAR_CACHE")
    return Path(folder).expanduser() if folder and folder != OFF else Path.home() / ".cache" / "autopar"


def keeps_work() -> bool:
    """Whether traces, plans and rules are kept and read again: not with ``AUTOPAR_CACHE=off``. Calibrations are no
    cache, and are read all the same."""
    return os.environ.get("AUTOPAR_CACHE") != OFF
