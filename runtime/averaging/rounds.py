"""Rounds: exchanges with the same replicas at the other ends, and what becomes of them if some leave."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from autopar.runtime.comm.groups import AxisGroup

from .pending import Sender, Values


class Round(Protocol):
    """An exchange that has begun."""

    def is_done(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        ...

    def wait(self) -> Values:
        """What arrived, by name."""
        ...


class Rounds(Protocol):
    """Begins rounds, in the same order on every replica. ``repeats``: whether a sender may be asked to send again."""

    repeats: bool

    def begin(self, lane: Hashable, send: Sender) -> Round:
        """Begins a round by ``send``. The one before in the same ``lane`` has been waited for."""
        ...


class SteadyRounds:
    """Rounds with ``peers``, all of whom have to stay."""

    repeats = False

    def __init__(self, peers: AxisGroup) -> None:
        self._peers = peers

    def begin(self, lane: Hashable, send: Sender) -> Round:
        return send(self._peers)
