"""Remembers which fields of a dataclass its user gave, and which have their default."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C")

# The field that lists the fields that were given.
GIVEN = "given"


def own_fields(cls: Any) -> tuple[Field[Any], ...]:
    """The fields of a dataclass that :func:`remembers_given` decorates, without :data:`GIVEN`."""
    return tuple(field for field in fields(cls) if field.name != GIVEN)


def default_of(field: Field[Any]) -> Any:
    """The value that a field has where it is not given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def remembers_given(cls: type[C]) -> type[C]:
    """A decorator for dataclasses with a field :data:`GIVEN`: the constructor sets it to the names of the fields that
    it is called with, in their order. :func:`dataclasses.replace` passes every field on, :data:`GIVEN` too: then those
    that are there, and those that no longer have their default."""
    initialise, names = cls.__init__, [field.name for field in own_fields(cls)]
    defaults = {field.name: default_of(field) for field in own_fields(cls)}

    @wraps(initialise)
    def initialise_given(self: C, *args: object, **kwargs: object) -> None:
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        before: Any = values.get(GIVEN)
        changed = values if before is None else {n for n in values if n in defaults and values[n] != defaults[n]}
        kwargs[GIVEN] = tuple(name for name in names if name in changed or name in (before or ()))
        initialise(self, *args, **kwargs)

    cls.__init__ = initialise_given  # type: ignore[assignment]
    return cls
