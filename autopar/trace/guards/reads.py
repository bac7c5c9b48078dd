"""Records which Python state a model reads while it is traced: attributes of its modules, of the objects these lead to
(configurations, dataclasses, modules in lists, loss functions), and variables of the functions that it runs.

The ``__getattribute__`` of these classes is replaced while the model runs.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.content.code_origin import is_written_by_user
from autopar.torch_internals.modules import is_flat_weights

from .before import Before
from .owners import Owner, is_property, members_of
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


class Reads:
    """Reads of the objects that ``model`` and ``loss_fn`` lead to. ``read`` are attributes, by the id of their object;
    ``variables`` are those of functions, globals, closures and classes, by namespace and name. What a call itself has
    put into an attribute before it reads it (a flag that says that it is being traced) does not depend on what was
    there, and is not among them.

    A call may change what it has read, so that the next call reads something else. ``before`` has what attributes of
    objects, variables and containers were; ``written`` are plain tensors of modules that were replaced, by path."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.owners: dict[int, Owner] = {}
        self.read: dict[tuple[int, str], None] = {}
        # The same by object, each with its position among all reads.
        self._names_of: dict[int, list[tuple[int, str]]] = {}
        self.variables: dict[tuple[int, str], Variable] = {}
        self.generators = WatchedGenerators()
        self.tree = frozenset(id(module) for module in model.modules())
        self._functions: dict[int, Callable[..., Any]] = {}
        self._kinds: dict[type, None] = {}
        self._names: set[str] = set()
        self.before = Before()
        self.written: dict[str, None] = {}
        self._put: set[tuple[int, str]] = set()
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._watched: dict[type, dict[str, object]] = {}
        self._is_on = False
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
                if not variable.is_of_library:
                    self.before.keep(variable, variable.name, variable.value())
                self.follow(variable.value(), variable.label, None)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Records reads inside the ``with`` block. Restores afterwards what the model wrote to variables, and to
        attributes of objects other than its modules."""
        self.before.begin()
        self._put.clear()
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
                for name, function in own.items():
                    delattr(kind, name) if function is MISSING else setattr(kind, name, function)
            self._watched.clear()
            self.before.restore()
            self._note_replaced()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restores what the model writes inside the ``with`` block to variables and attributes that it has read."""
        try:
            yield
        finally:
            self.before.restore()

    def _watch(self, kind: type) -> None:
        """Records what is read from instances of ``kind``, and written to them."""
        if kind in self._watched:
            return
        get: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]
        put: Callable[[Any, str, Any], None] = kind.__setattr__  # type: ignore[assignment]

        def read(owner: Any, name: str) -> Any:
            return self._note(owner, name, get) if id(owner) in self.owners else get(owner, name)

        def write(owner: Any, name: str, value: Any) -> None:
            record = self.owners.get(id(owner))
            old = MISSING if record is None else record.get(name)
            put(owner, name, value)
            if record is not None:
                self._note_write(record, name, old)

        names = ("__getattribute__", "__setattr__")
        self._watched[kind] = {name: vars(kind).get(name, MISSING) for name in names}
        kind.__getattribute__, kind.__setattr__ = read, write  # type: ignore[method-assign,assignment]

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
        is_own = key in self._put
        if not is_own:
            self._names_of.setdefault(id(owner), []).append((len(self.read), name))
            self.read[key] = None
            self._keep(record, name, record.get(name))
        value = inner(owner, name)
        if isinstance(value, torch.Tensor) and not is_own:
            self._tensors[key] = value
        self.follow(value, f"{record.label}.{name}", key)
        return value

    def of(self, identities: Iterable[int]) -> list[tuple[int, str]]:
        """What was read of the objects with these ids, in order."""
        found = ((place, identity, name) for identity in identities for place, name in self._names_of.get(identity, ()))
        return [(identity, name) for _, identity, name in sorted(found)]

    def _note_write(self, owner: Owner, name: str, old: object) -> None:
        """Notes that the model has written to an attribute, whose value was ``old``."""
        key = id(owner.value), name
        if name not in MACHINERY and key not in self.read and not is_property(owner.value, name):
            self._put.add(key)
            self._keep(owner, name, old)

    def _keep(self, owner: Owner, name: str, value: object) -> None:
        if id(owner.value) not in self.tree:  # What modules of the model have is restored elsewhere.
            self.before.keep(owner, name, value)

    def _note_replaced(self) -> None:
        for (identity, name), tensor in self._tensors.items():
            owner = self.owners[identity]
            now = owner.get(name)
            if isinstance(now, torch.Tensor) and now is not tensor:
                self.written[f"{owner.label}.{name}".removeprefix("model.")] = None
        self._tensors.clear()

    def is_reachable(self, owner: Owner) -> bool:
        """Whether an object can still be reached where it was, and was not created by the call alone."""
        if owner.of is None or id(owner.value) in self.tree:
            return True
        identity, name = owner.of
        holder = self.owners[identity]
        now = members_of(holder).get(name, MISSING)
        is_there = now is owner.value or any(item is owner.value for _, item in within(now))
        return (is_there or now is MISSING or isinstance(now, nn.Module)) and self.is_reachable(holder)


def _is_watchable(kind: type) -> bool:
    """Whether reads of instances can be recorded, and the class is the user's."""
    is_own = kind.__module__.partition(".")[0] not in _FOREIGN or kind is argparse.Namespace
    return bool(kind.__flags__ & _HEAP_TYPE) and is_own
