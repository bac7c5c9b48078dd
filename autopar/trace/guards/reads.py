"""Records which Python state a model reads while it is traced: attributes of its modules, of the objects these lead to
(configurations, dataclasses, modules in lists, loss functions), and variables of the functions that it runs.

The ``__getattribute__`` of these classes is replaced while the model runs.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.content.code_origin import is_written_by_user
from autopar.torch_internals.modules import BUFFERS, CHILDREN, PARAMETERS, is_flat_weights

from .random_numbers import GENERATORS, WatchedGenerators
from .values import CONTAINERS, MISSING, PLAIN, within
from .variables import (
    Variable,
    attributes_named,
    is_own_code,
    variables_of,
    variables_of_class,
    variables_of_partial,
)

# The mode, members and hooks of any module. The mode belongs to the kind of call; members are guarded as a whole.
MACHINERY = frozenset(vars(nn.Module()))
_TORCH_MODULE = sys.modules[nn.Module.__module__].__file__
# Py_TPFLAGS_HEAPTYPE of CPython's object.h.
_HEAP_TYPE = 1 << 9
# Only the identity of objects is guarded whose classes are from these packages.
_FOREIGN = {"torch", "numpy", "autopar", *sys.stdlib_module_names} - {"__main__"}
_NO_OWNERS = (torch.Tensor, np.ndarray, types.ModuleType, type, types.BuiltinFunctionType)


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


class Reads:
    """Reads of the objects that ``model`` and ``loss_fn`` lead to. ``read`` are attributes, by the id of their object;
    ``variables`` are those of functions, globals, closures and classes, by namespace and name. A call may change an
    attribute after it reads it, so that the next call reads something else: ``rewritten`` are such attributes of
    objects, ``written`` such plain tensors of modules, by path."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.owners: dict[int, Owner] = {}
        self.read: dict[tuple[int, str], None] = {}
        self.variables: dict[tuple[int, str], Variable] = {}
        self.generators = WatchedGenerators()
        self.tree = frozenset(id(module) for module in model.modules())
        self._functions: dict[int, Callable[..., Any]] = {}
        self._kinds: dict[type, None] = {}
        self._names: set[str] = set()
        self.rewritten: dict[str, None] = {}
        self.written: dict[str, None] = {}
        self._after: dict[tuple[int, str], object] = {}
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._first: dict[tuple[int, str], object] = {}
        self._watched: dict[type, object] = {}
        self._is_on = False
        self._values: dict[tuple[int, str], object] = {}
        self._contents: list[tuple[Any, Any]] = []
        for path, module in model.named_modules():
            self._own(module, f"model.{path}" if path else "model", None)
        if loss_fn is not None:
            self.follow(loss_fn, "loss_fn", None)

    def _own(self, value: Any, label: str, of: tuple[int, str] | None) -> None:
        self.owners.setdefault(id(value), Owner(value, label, of))
        self._pair_class(type(value))
        if self._is_on and not isinstance(value, nn.Module):
            self._watch(type(value))

    def follow(self, value: Any, label: str, of: tuple[int, str] | None) -> None:
        """Records reads of ``value`` too, and of what it contains."""
        self._follow_one(value, label, of)
        if isinstance(value, (*CONTAINERS, types.SimpleNamespace)):
            for place, item in within(value):
                self._follow_one(item, label + place, of)

    def _follow_one(self, value: Any, label: str, of: tuple[int, str] | None) -> None:
        if isinstance(value, PLAIN) or id(value) in self.owners:
            return
        if isinstance(value, GENERATORS):
            self.generators.watch(value, label)
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._own(module, f"{label}.{path}" if path else label, of)
        elif isinstance(value, types.MethodType):
            self._follow_one(value.__self__, f"{label}.__self__", of)
            self._follow_one(value.__func__, label, of)
        elif isinstance(value, (staticmethod, classmethod)):
            self._follow_one(value.__func__, label, of)
        elif isinstance(value, property):
            self._follow_one(value.fget, label, of)
        elif isinstance(value, types.FunctionType):
            self._follow_function(value)
        elif isinstance(value, functools.partial):
            self._follow_partial(value, label, of)
        elif not isinstance(value, _NO_OWNERS) and _is_watchable(type(value)):
            self._own(value, label, of)
            called = next((vars(kind)["__call__"] for kind in type(value).__mro__ if "__call__" in vars(kind)), None)
            if isinstance(called, types.FunctionType):
                self._follow_function(called)

    def _follow_function(self, function: types.FunctionType) -> None:
        if id(function) in self._functions or not is_own_code(function.__code__):
            return
        self._functions[id(function)] = function
        self._note_variables(variables_of(function))
        names = attributes_named(function.__code__) - self._names
        self._names |= names
        for kind in list(self._kinds):
            self._note_variables(variables_of_class(kind, names))

    def _follow_partial(self, partial: functools.partial[Any], label: str, of: tuple[int, str] | None) -> None:
        if id(partial) not in self._functions:
            self._functions[id(partial)] = partial
            self._note_variables(variables_of_partial(partial, label))
            self._follow_one(partial.func, label, of)

    def _pair_class(self, kind: type) -> None:
        """Records as read what known code names of a class: it may read it through the class itself."""
        if kind not in self._kinds and any(map(is_written_by_user, kind.__mro__)):
            self._kinds[kind] = None
            self._note_variables(variables_of_class(kind, self._names))

    def _note_variables(self, variables: Iterable[Variable]) -> None:
        for variable in variables:
            key = id(variable.space), variable.name
            if key not in self.variables:
                self.variables[key] = variable
                self._values[key] = variable.value()
                self._contents += _copies_of(variable.value())
                self.follow(variable.value(), variable.label, None)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Records reads inside the ``with`` block. Restores afterwards what the model wrote to attributes that it had
        read from objects other than its modules."""
        try:
            self._is_on = True
            self._watch(nn.Module)
            for owner in list(self.owners.values()):
                if not isinstance(owner.value, nn.Module):
                    self._watch(type(owner.value))
            yield
        finally:
            self._is_on = False
            for kind, own in self._watched.items():
                if own is MISSING:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = own  # type: ignore[method-assign,assignment]
            self._watched.clear()
            self._restore()

    def carry(self) -> None:
        """Gives objects the attributes that a first call left in them."""
        for (identity, name), value in self._after.items():
            self.owners[identity].set(name, value)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restores what the model writes inside the ``with`` block to attributes that it has read from objects."""
        try:
            yield
        finally:
            self._restore()

    def _watch(self, kind: type) -> None:
        """Records what is read from instances of ``kind``."""
        if kind in self._watched:
            return
        inner: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]

        def read(owner: Any, name: str) -> Any:
            return self._note(owner, name, inner) if id(owner) in self.owners else inner(owner, name)

        self._watched[kind] = vars(kind).get("__getattribute__", MISSING)
        kind.__getattribute__ = read  # type: ignore[method-assign,assignment]

    def _note(self, owner: Any, name: str, inner: Callable[[Any, str], Any]) -> Any:
        key = id(owner), name
        if is_flat_weights(owner, name):  # The parameters again.
            return inner(owner, name)
        if name in MACHINERY or key in self.read or (name.startswith("__") and name != "__dict__"):
            return inner(owner, name)
        record = self.owners[id(owner)]
        if name == "__dict__":
            members: dict[str, Any] = inner(owner, name)
            if sys._getframe(2).f_code.co_filename != _TORCH_MODULE:
                for each in members.keys() - MACHINERY:
                    self._note(owner, each, inner)
            return members
        self.read[key] = None
        if key[0] not in self.tree:
            self._first[key] = record.get(name)
            self._contents += _copies_of(record.get(name))
        value = inner(owner, name)
        if isinstance(value, torch.Tensor):
            self._tensors[key] = value
        self.follow(value, f"{record.label}.{name}", key)
        return value

    def _restore(self) -> None:
        for (identity, name), old in self._first.items():
            owner = self.owners[identity]
            if owner.get(name) is not old:
                self.rewritten[f"{owner.label}.{name}".removeprefix("model.")] = None
                self._after.setdefault((identity, name), owner.get(name))
                owner.set(name, old)
        for (identity, name), tensor in self._tensors.items():
            owner = self.owners[identity]
            now = owner.get(name)
            if isinstance(now, torch.Tensor) and now is not tensor:
                self.written[f"{owner.label}.{name}".removeprefix("model.")] = None
        self._tensors.clear()

    def has_changed(self) -> bool:
        """Whether a variable, or a container in a variable or in an attribute of an object, is no longer what it was
        when it was first met."""
        is_other = any(self.variables[key].value() is not value for key, value in self._values.items())
        return is_other or any(_ids_in(container) != _ids_in(saved) for container, saved in self._contents)

    def undo(self) -> None:
        """Gives variables, and the containers in variables and in attributes of objects, what they had when they were
        first met, so that the model can run as if it had not run."""
        for container, saved in self._contents:
            if _ids_in(container) != _ids_in(saved):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(saved)
        for key, value in self._values.items():
            if self.variables[key].value() is not value:
                self.variables[key].put(value)

    def is_reachable(self, owner: Owner) -> bool:
        """Whether an object can still be reached where it was, and was not created by the call alone."""
        if owner.of is None or id(owner.value) in self.tree:
            return True
        identity, name = owner.of
        holder = self.owners[identity]
        now = members_of(holder).get(name, MISSING)
        is_there = now is owner.value or any(item is owner.value for _, item in within(now))
        return (is_there or now is MISSING or isinstance(now, nn.Module)) and self.is_reachable(holder)


def _copies_of(value: object) -> list[tuple[Any, Any]]:
    """The containers that can be changed among ``value`` and what is inside it, each with a copy."""
    found: dict[int, tuple[Any, Any]] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, CONTAINERS) and id(each) not in found:
            found[id(each)] = each, copy(each)
            waiting += each.values() if isinstance(each, Mapping) else each
    return [(each, saved) for each, saved in found.values() if type(each) in (dict, list, set, deque)]


def _ids_in(container: Any) -> list[int]:
    if isinstance(container, Mapping):
        return [id(part) for item in container.items() for part in item]
    return [id(item) for item in container]


def members_of(owner: Owner) -> Mapping[str, Any]:
    """The attributes of an object, for a module with its children, buffers and parameters."""
    if isinstance(owner.value, nn.Module):
        own = owner.members
        return {**own[CHILDREN], **own[BUFFERS], **own[PARAMETERS], **own}
    return owner.members


def _is_watchable(kind: type) -> bool:
    """Whether reads of instances can be recorded, and the class is the user's."""
    is_own = kind.__module__.partition(".")[0] not in _FOREIGN or kind is argparse.Namespace
    return bool(kind.__flags__ & _HEAP_TYPE) and is_own
