"""Objects whose attributes a model reads while it is traced."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.torch_internals.modules import BUFFERS, CHILDREN, PARAMETERS

from .values import MISSING


@dataclass(frozen=True)
class Owner:
    """An object whose attributes are read. ``label`` is the path by which it was first reached
    (``model.layers.0.config``); ``of`` is the attribute of another object that led to it, None for a module of the
    model."""

    value: Any
    label: str
    of: tuple[int, str] | None = None

    @property
    def members(self) -> dict[str, Any]:
        """Its attributes; empty if it has only slots."""
        return _members(self.value) or {}

    @property
    def has_members(self) -> bool:
        """Whether it has a ``__dict__``, and so can be given any attribute."""
        return _members(self.value) is not None

    def get(self, name: str) -> object:
        """The attribute that the object itself stores under that name, also in a slot."""
        own = _members(self.value)
        if own is not None:
            return own.get(name, MISSING)
        try:
            return object.__getattribute__(self.value, name)
        except AttributeError:
            return MISSING

    def set(self, name: str, value: object) -> None:
        """Sets an attribute, or deletes it if ``value`` is MISSING."""
        own = _members(self.value)
        if own is None:
            object.__delattr__(self.value, name) if value is MISSING else object.__setattr__(self.value, name, value)
        elif value is MISSING:
            del own[name]
        else:
            own[name] = value


def _members(value: object) -> dict[str, Any] | None:
    try:
        members = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return members if isinstance(members, dict) else None


def members_of(owner: Owner) -> Mapping[str, Any]:
    """The attributes of an object, for a module with its children, buffers and parameters."""
    if isinstance(owner.value, nn.Module):
        own = owner.members
        return {**own[CHILDREN], **own[BUFFERS], **own[PARAMETERS], **own}
    return owner.members


def is_property(value: object, name: str) -> bool:
    """Whether the class of ``value`` computes what writing that attribute does."""
    attribute = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return hasattr(type(attribute), "__set__") and not isinstance(attribute, types.MemberDescriptorType)
