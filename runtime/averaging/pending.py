"""A mean over replicas that is being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.runtime.comm.groups import AxisGroup

from .waits import awaited

Values = dict[str, torch.Tensor]


class Pending:
    """A mean in flight. ``works``: the communication; ``finish``: makes the result of what arrived."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Values]) -> None:
        self.works, self.finish = works, finish
        self._result: Values | None = None

    def is_done(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        return self._result is not None or all(work.is_completed() for work in self.works)

    def wait(self) -> Values:
        """The means by name; the same on every replica."""
        if self._result is None:
            for work in self.works:
                awaited(work.wait)
            self._result = self.finish()
        return self._result


# Sends what was made ready to be sent to some peers. It may be called again, with others.
Sender = Callable[[AxisGroup], Pending]


def joined(*senders: Sender) -> Sender:
    """One that sends what ``senders`` send, under names that differ."""

    def send(peers: AxisGroup) -> Pending:
        parts = [sender(peers) for sender in senders]

        def finish() -> Values:
            return {name: value for part in parts for name, value in part.finish().items()}

        return Pending([work for part in parts for work in part.works], finish)

    return send
