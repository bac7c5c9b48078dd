"""Says which ranks of this host the others wait for before they can speak to each other.

``torch.distributed.init_process_group`` waits for half an hour for a rank that does not come, and names none. But the
ranks that have come have a connection to the store of rank 0, and the kernel tells the launcher which have.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.runtime.comm.minority import named

# Seconds after which a rank is late, and again when it has been twice as long.
# Chosen: that of Options(timeout=).
LATE = 60.0
# Seconds between two looks.
# Chosen: a look reads a few files of each rank.
_LOOK = 5.0
# In the tables of /proc/net, the state of a connection.
_ESTABLISHED = "01"


@dataclass(frozen=True)
class LocalRank:
    """A ``rank`` whose ``process`` this one has started, and the ``port`` of the ranks' store."""

    rank: int
    process: int
    port: int


def local_ranks() -> list[LocalRank]:
    """The ranks that this process has started; none where /proc does not tell."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for process in map(int, children.read_text().split()):
                with suppress(OSError, KeyError, ValueError):
                    lines = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
                    given = dict(line.split("=", 1) for line in lines if "=" in line)
                    found.append(LocalRank(int(given["RANK"]), process, int(given["MASTER_PORT"])))
    return sorted(found, key=lambda each: each.rank)


def has_come(rank: LocalRank) -> bool:
    """Whether it has a connection to the store."""
    connected, wanted = set(), f":{rank.port:04X}"
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{rank.process}/net/{table}").read_text().splitlines()[1:]]
            connected |= {f"socket:[{row[9]}]" for row in rows if row[2].endswith(wanted) and row[3] == _ESTABLISHED}
    with suppress(OSError):
        for each in Path(f"/proc/{rank.process}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(each) in connected:
                    return True
    return False


class LateRanks:
    """Looks at the ranks of this host again and again."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._came: set[int] = set()
        self._mentioned = 0.0

    def look(self, ranks: Sequence[LocalRank], now: float) -> str:
        """What there is to say, or "". A rank that has come once is not late any more."""
        present = [each for each in ranks if has_come(each)]
        self._came |= {each.process for each in present}
        self._since = {each.process: self._since.get(each.process, now) for each in ranks}
        late = [each for each in ranks if each.process not in self._came]
        waited = now - max(self._since.values(), default=now)
        if not late or not present or waited < LATE:
            self._mentioned = 0.0
            return ""
        if waited < 2 * self._mentioned:
            return ""
        self._mentioned = waited
        processes, has = ", ".join(str(each.process) for each in late[:8]), "has" if len(late) == 1 else "have"
        wait = "waits" if len(present) == 1 else "wait"
        return (
            f"{named([each.rank for each in late])} (process {processes}) {has} not come to init_process_group or "
            f"autopar.parallelize after {waited:.0f} s; {named([each.rank for each in present])} {wait} there "
            "(no error so far)"
        )


@contextmanager
def late_ranks_named() -> Iterator[None]:
    """Within, a thread says on stderr which ranks the others wait for."""
    done, late = threading.Event(), LateRanks()

    def run() -> None:
        while not done.wait(_LOOK):
            sentence = late.look(local_ranks(), time.monotonic())
            if sentence:
                print(f"autopar run: {sentence}", file=sys.stderr, flush=True)

    threading.Thread(target=run, name="autopar late ranks", daemon=True).start()
    try:
        yield
    finally:
        done.set()
