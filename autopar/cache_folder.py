"""Where autopar keeps what it has measured and found out on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$AUTOPAR_CACHE``, by default ``~/.cache/autopar``; it may not exist yet."""
    folder = os.environ.get("AUTOPAR_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "autopar"
