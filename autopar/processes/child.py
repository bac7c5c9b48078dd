"""A process that was started here, as the one that waits for it sees it."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass

# An exit status as the template writes it: HEADER of template_server.py.
STATUS_BYTES = 8


@dataclass
class Child:
    """``status`` is its wait status once it has ended; ``ask`` finds it out, waiting for it if told to."""

    pid: int
    ask: Callable[[bool], int | None]
    status: int | None = None

    def poll(self, block: bool = False) -> int | None:
        """The wait status, None while it runs."""
        if self.status is None:
            self.status = self.ask(block)
        return self.status


def own(pid: int) -> Child:
    """A child of this process itself."""

    def ask(block: bool) -> int | None:
        found, status = os.waitpid(pid, 0 if block else os.WNOHANG)
        return status if found else None

    return Child(pid, ask)


def reported(pid: int, pipe: int) -> Child:
    """A child of the template, which writes the status to ``pipe``. If the template ends, its children are killed."""

    def ask(block: bool) -> int | None:
        if not block and not select.select([pipe], [], [], 0)[0]:
            return None
        said = os.read(pipe, STATUS_BYTES)
        os.close(pipe)
        return int.from_bytes(said, "little") if said else 9

    return Child(pid, ask)
