"""Waits for the ranks of other replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.runtime.comm.waiting import WAITING


class LostPeersError(RuntimeError):
    """Communication with other replicas has failed."""


def awaited(wait: Callable[[], Any]) -> Any:
    """The result of ``wait``, whose time counts as waiting. Raises :class:`LostPeersError` for its RuntimeError, since
    gloo has no class of its own for a peer that has left."""
    try:
        return WAITING.during(wait)
    except RuntimeError as error:
        raise LostPeersError(str(error)) from error
