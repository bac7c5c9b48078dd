"""Gives this process a share of one core, like a slower machine: a control group with a quota (Linux, root)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# Microseconds in which the quota is used up and renewed. Chosen: a small part of a step, so that a process is slow
# rather than stopped.
PERIOD = 10_000


@contextlib.contextmanager
def throttled(share: float) -> Iterator[None]:
    """All threads of this process together get ``share`` of a core while the context lasts. Raises ``OSError`` where
    control groups cannot be made."""
    second = (ROOT / "cgroup.controllers").exists()
    parent = ROOT if second else ROOT / "cpu"
    before = parent / _own_group("" if second else "cpu")
    group = parent / f"autopar-share-{os.getpid()}"
    group.mkdir()
    quota = round(share * PERIOD)
    if second:
        (group / "cpu.max").write_text(f"{quota} {PERIOD}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own_group(controller: str) -> str:
    """The group of this process under a controller, relative to its root."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""
