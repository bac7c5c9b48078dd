"""The folder in which autopar stores calibrations and caches traces, plans, rules and compiled code on this machine."""

from __future__ import annotations

import os
from pathlib import Path

OFF = "off"
# What is cached, one folder for each kind.
KINDS = ("traces", "plans", "rules", "compiled")


def cache_folder() -> Path:
    """``$AUTOPAR_CACHE``, by default ``~/.cache/autopar``; it may not exist yet."""
    folder = os.environ.get("AUTOPAR_CACHE")
    return Path(folder).expanduser() if folder and folder != OFF else Path.home() / ".cache" / "autopar"


def caching_enabled() -> bool:
    """Whether traces, plans and rules are cached on disk: not with ``AUTOPAR_CACHE=off``. Calibrations are not a cache,
    and are read in any case."""
    return os.environ.get("AUTOPAR_CACHE") != OFF
