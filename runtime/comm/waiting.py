"""How long this process has waited for communication, on devices whose waits block it (gloo)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Waiting:
    """``seconds``: waited since the process began. A rank that others wait for waits least itself."""

    seconds = 0.0

    def during(self, wait: Callable[[], Any]) -> Any:
        """The result of ``wait``, whose time counts."""
        begin = time.perf_counter()
        try:
            return wait()
        finally:
            self.seconds += time.perf_counter() - begin


# Of this process, which does one thing at a time.
WAITING = Waiting()
