"""A mean over replicas that is being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .waits import awaited


class Pending:
    """A mean in flight. ``works``: the communication; ``finish``: makes the result of what arrived."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._works, self._finish = works, finish
        self._result: dict[str, torch.Tensor] | None = None

    def is_done(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        return self._result is not None or all(work.is_completed() for work in self._works)

    def wait(self) -> dict[str, torch.Tensor]:
        """The means by name; the same on every replica."""
        if self._result is None:
            for work in self._works:
                awaited(work.wait)
            self._result = self._finish()
        return self._result
