"""A started process, as seen by the process that waits for it."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass

# An exit status as the template writes it: HEADER of template_server.py.
STATUS_BYTES = 8


@dataclass
class Child:
    """A child process. ``status`` is its wait status once it has ended; ``ask(block)`` queries it, and waits for the
    end if ``block``."""

    pid: int
    ask: Callable[[bool], int | None]
    status: int | None = None

    def poll(self, block: bool = False) -> int | None:
        """The wait status, None while it runs."""
        if self.status is None:
            self.status = self.ask(block)
        return self.status


def own_child(pid: int) -> Child:
    """A child of this process itself."""

    def ask(block: bool) -> int | None:
        ended, status = os.waitpid(pid, 0 if block else os.WNOHANG)
        return status if ended else None

    return Child(pid, ask)


def template_child(pid: int, pipe: int) -> Child:
    """A child of the template, which writes the status to ``pipe``. If the template ends, its children are killed."""

    def ask(block: bool) -> int | None:
        if not block and not select.select([pipe], [], [], 0)[0]:
            return None
        data = os.read(pipe, STATUS_BYTES)
        os.close(pipe)
        return int.from_bytes(data, "little") if data else 9

    return Child(pid, ask)
