"""The attributes of Python objects that a trace read, by name, so that a cached trace can read the same attributes of
another model of the same kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torch import nn

from .guards import Guards, guards_of
from .owners import members_of
from .reads import Reads
from .values import MISSING

Names = tuple[tuple[str, str], ...]


def names_of(reads: Reads) -> Names:
    """The attributes that were read, in order: the label of their object, and their name there."""
    return tuple((reads.owners[identity].label, name) for identity, name in reads.read)


def guards_by_name(model: nn.Module, loss_fn: Callable[..., Any] | None, names: Sequence[tuple[str, str]]) -> Guards:
    """The guards of the same reads of ``model``, with its current values. Raises ValueError if it lacks an object that
    was read."""
    reads = Reads(model, loss_fn)
    by_label: dict[str, list[int]] = {}
    followed = 0
    for label, name in names:
        for identity in islice(reads.owners, followed, None):
            by_label.setdefault(reads.owners[identity].label, []).append(identity)
        followed = len(reads.owners)
        identities = by_label.get(label, [])
        if len(identities) != 1:
            raise ValueError(f"{len(identities)} objects are called {label}")
        key = identities[0], name
        reads.read[key] = None
        reads.follow(_value(reads, key), f"{label}.{name}", key)
    return guards_of(model, reads)


def _value(reads: Reads, key: tuple[int, str]) -> Any:
    """The value that is read there. None for a property, which would run the model's code."""
    owner, name = reads.owners[key[0]], key[1]
    if name in members_of(owner):
        return members_of(owner)[name]
    attribute = inspect.getattr_static(owner.value, name, MISSING)
    return None if attribute is MISSING or isinstance(attribute, property) else getattr(owner.value, name, None)


def same_guards(first: Guards, second: Guards) -> bool:
    """Whether both guard the same places."""
    return _places(first) == _places(second) and first.members == second.members


def _places(guards: Guards) -> set[tuple[str, str, int]]:
    """Labels, names, and the ids of the dicts they are in; 0 for a class, which returns a new view each time."""
    return {(g.label, g.key, id(g.space) if isinstance(g.space, dict) else 0) for g in guards.read}
