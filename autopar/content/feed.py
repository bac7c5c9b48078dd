"""The interface of the hash that :mod:`.code` feeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Unkeyable(Exception):
    """An object cannot be hashed by its content; the message says which and why."""


class Feed(Protocol):
    """A hash of objects, see :class:`.Contents`."""

    @property
    def count(self) -> int:
        """How many objects were fed."""

    def add(self, *words: object) -> None:
        """Adds texts and numbers as they are."""

    def is_repeated(self, value: object) -> bool:
        """Whether ``value`` was fed before. If so, adds a reference to it; otherwise gives it a number."""

    def feed(self, value: Any, where: str) -> None:
        """Feeds ``value``, which is called ``where`` in errors. Raises :class:`Unkeyable`."""

    def feed_all(self, label: str, values: Iterable[tuple[object, Any]], where: str) -> None:
        """Feeds named values in order."""
