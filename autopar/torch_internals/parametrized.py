"""Modules whose weights are computed from others (``torch.nn.utils.parametrize``), which torch refuses to pickle: each
is of a class made for it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# What makes a module's class and its properties (2.11).
from torch.nn.utils.parametrize import _inject_new_class, _inject_property, is_parametrized

__all__ = ["reduced_if_parametrized"]

Reduced = tuple[Callable[..., nn.Module], tuple[type[nn.Module], tuple[str, ...]], Any]


def reduced_if_parametrized(value: Any) -> Reduced | None:
    """What pickle makes a parametrized module from: its class before, what is parametrized, and its state; None for
    anything else. Relies on the home of the classes that parametrizing makes, each of the class before (2.11)."""
    made = isinstance(value, nn.Module) and type(value).__module__ == is_parametrized.__module__
    if not made or not is_parametrized(value):
        return None
    before = type(value).__bases__[0]
    state_of = getattr(before, "__getstate__", None)  # Every class has one since Python 3.11.
    state = value.__dict__ if state_of is None else state_of(value)
    return _parametrized, (before, tuple(value.parametrizations)), state


def _parametrized(before: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module without state of the class that parametrizing ``names`` of a ``before`` makes. A ``__new__`` of its own
    may ask for arguments, and whatever it does is in the state."""
    module = nn.Module.__new__(before)
    _inject_new_class(module)
    for name in names:
        _inject_property(module, name)
    return module
