"""What a trace read of Python objects, by name, so that a trace that is kept can look at the same places of another
model of the same kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torch import nn

from .guards import Guards, guards_of
from .reads import Reads, members_of
from .values import MISSING

Names = tuple[tuple[str, str], ...]


def names_of(reads: Reads) -> Names:
    """The attributes that were read, in order: how their object is called, and their name there."""
    return tuple((reads.owners[identity].label, name) for identity, name in reads.read)


def guards_by_name(model: nn.Module, loss_fn: Callable[..., Any] | None, names: Sequence[tuple[str, str]]) -> Guards:
    """The guards of the same reads of ``model``, as its values are now. Raises ValueError if it has not all that was
    read."""
    reads = Reads(model, loss_fn)
    called: dict[str, list[int]] = {}
    known = 0
    for label, name in names:
        for identity in islice(reads.owners, known, None):
            called.setdefault(reads.owners[identity].label, []).append(identity)
        known = len(reads.owners)
        found = called.get(label, [])
        if len(found) != 1:
            raise ValueError(f"{len(found)} objects are called {label}")
        key = found[0], name
        reads.read[key] = None
        reads.follow(_value(reads, key), f"{label}.{name}", key)
    return guards_of(model, reads)


def _value(reads: Reads, key: tuple[int, str]) -> Any:
    """What is read there, except what a property makes: that is the model's code, which is not to be run here."""
    owner, name = reads.owners[key[0]], key[1]
    if name in members_of(owner):
        return members_of(owner)[name]
    held = inspect.getattr_static(owner.value, name, MISSING)
    return None if held is MISSING or isinstance(held, property) else getattr(owner.value, name, None)


def same_guards(one: Guards, other: Guards) -> bool:
    """Whether both look at the same places."""
    return _places(one) == _places(other) and one.members == other.members


def _places(guards: Guards) -> set[tuple[str, str, int]]:
    """Labels, names, and the dicts they are in; of a class there is a new view each time."""
    return {(g.label, g.key, id(g.space) if isinstance(g.space, dict) else 0) for g in guards.read}
