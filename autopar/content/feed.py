"""What :mod:`.code` needs of the hash that it feeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Unkeyable(Exception):
    """What an object is cannot be told; the message says which and why."""


class Feed(Protocol):
    """A hash of objects, see :class:`.Contents`."""

    @property
    def known(self) -> int:
        """How many objects were met."""

    def say(self, *words: object) -> None:
        """Feeds texts and numbers as they are."""

    def is_known(self, value: object) -> bool:
        """Whether ``value`` was met before: then feeds a reference to it, else numbers it."""

    def feed(self, value: Any, where: str) -> None:
        """Feeds ``value``, which is called ``where`` in errors. Raises :class:`Unkeyable`."""

    def feed_all(self, label: str, values: Iterable[tuple[object, Any]], where: str) -> None:
        """Feeds named values in order."""
