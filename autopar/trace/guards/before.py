"""What attributes of objects, variables and containers were before a call, to put them back after it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from .containers import contents_of, refill
from .owners import Owner
from .variables import Variable

Key = tuple[int, str]


@dataclass(frozen=True)
class _Attribute:
    """An attribute of an object, in the manner of :class:`Variable`."""

    owner: Owner
    name: str

    @property
    def label(self) -> str:
        return f"{self.owner.label}.{self.name}"

    def value(self) -> object:
        return self.owner.get(self.name)

    def put(self, value: object) -> None:
        self.owner.set(self.name, value)


@dataclass
class Before:
    """What a model may change when it is called, with its values before the call. ``rewritten`` are those that a call
    has left with another value: the next call would read something else."""

    rewritten: dict[str, None] = field(default_factory=dict)
    _places: dict[Key, tuple[Variable | _Attribute, Any]] = field(default_factory=dict)
    _containers: dict[int, tuple[str, Any, Any]] = field(default_factory=dict)
    _left: dict[Key, Any] = field(default_factory=dict)
    _left_in: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def keep(self, place: Variable | Owner, name: str, value: object) -> None:
        """Remembers ``value``, and the contents of containers in it, of the attribute ``name`` of an object, or of a
        variable."""
        where = _Attribute(place, name) if isinstance(place, Owner) else place
        key = id(place.value if isinstance(place, Owner) else place.space), name
        if key not in self._places:
            self._places[key] = where, value
            for container, saved in contents_of([value]):
                self._containers.setdefault(id(container), (where.label, container, saved))

    def begin(self) -> None:
        """Forgets what earlier calls changed."""
        for changes in (self.rewritten, self._left, self._left_in):
            changes.clear()

    def restore(self) -> None:
        """Puts everything back as it was."""
        for identity, (label, container, saved) in self._containers.items():
            if _ids_in(container) != _ids_in(saved):
                self._note(label)
                self._left_in.setdefault(identity, (container, copy(container)))
                refill(container, saved)
        for key, (place, old) in self._places.items():
            if place.value() is not old:
                self._note(place.label)
                self._left.setdefault(key, place.value())
                place.put(old)

    def carry(self) -> None:
        """Gives everything the values that a first call left."""
        for container, left in self._left_in.values():
            refill(container, left)
        for key, value in self._left.items():
            self._places[key][0].put(value)

    def _note(self, label: str) -> None:
        self.rewritten[label.removeprefix("model.")] = None


def _ids_in(container: Any) -> list[int]:
    return list(map(id, _parts(container)))


def _parts(container: Any) -> Iterator[object]:
    if isinstance(container, dict):
        for item in container.items():
            yield from item
    else:
        yield from container
