"""Hashes Python objects by content: their classes, code and values, so that two processes recognise equal ones.

Only known kinds of objects are hashed. Anything that may hide state, or read from outside (files, clocks, the
environment, other random numbers than torch's), raises :class:`Unkeyable`. The user's code is hashed with everything
that it refers to; that of installed libraries by version and by the code of its functions, so that a function that was
replaced changes the hash (:mod:`.code`).
"""

from __future__ import annotations

import datetime
import enum
import functools
import hashlib
import io
import logging
import pathlib
import random
import re
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.torch_internals.hugging_face import IGNORED_MEMBERS
from autopar.torch_internals.modules import BUFFERS, PARAMETERS
from autopar.torch_internals.tensors import accumulation_hooks, gradient_hooks

from .code import Code
from .feed import Unkeyable
from .tensor_digest import tensor_digest

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(range, datetime.date, datetime.datetime, datetime.timedelta),
)
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter, types.MappingProxyType)
_REFUSED = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState, io.IOBase, types.FrameType)
# Values that code refers to by name.
_NAMED = frozenset(("members", "globals", "attributes", "closure"))
# Classes that hold nothing a model computes with.
_EMPTY = (logging.Logger, logging.Handler)


class Contents:
    """Feeds objects to a hash. An object that is fed again is hashed as a reference to the first time, so that sharing,
    and tying of weights, is part of the hash."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []
        self._name = ""  # The name by which code refers to what is being fed; "" if unknown.
        self.code = Code(self)

    def hexdigest(self) -> str:
        """The hash of everything that was fed."""
        self.code.finish()
        return self._digest.hexdigest()

    @property
    def count(self) -> int:
        """How many objects were fed."""
        return len(self._seen)

    def add(self, *words: object) -> None:
        """Adds texts and numbers as they are."""
        for word in words:
            text = str(word).encode(errors="surrogatepass")
            self._digest.update(b"%d:" % len(text))
            self._digest.update(text)

    def is_repeated(self, value: object) -> bool:
        """Whether ``value`` was fed before. If so, adds a reference to it; otherwise gives it a number."""
        number = self._seen.get(id(value))
        if number is not None:
            self.add("again", number)
            return True
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)  # An id may be reused once its object is deleted.
        return False

    def feed(self, value: Any, where: str) -> None:
        """Feeds ``value``, which is called ``where`` in errors. Raises :class:`Unkeyable`."""
        kind = type(value)
        if kind in _ATOMS:
            self.add(kind.__name__, repr(value))
        elif isinstance(value, enum.Enum):
            self.add("enum", kind.__module__, kind.__qualname__, value.name)
            self.feed(value.value, where)
        elif kind is slice:
            self.feed(("slice", value.start, value.stop, value.step), where)
        elif self._is_noted(value):
            return
        elif isinstance(value, torch.Tensor):
            self._tensor(value, where)
        elif isinstance(value, nn.Module):
            self._module(value, where)
        elif not self._container(value, where) and not self.code.feed(value, where):
            self._object(value, where)

    def _is_noted(self, value: object) -> bool:
        self.code.note(self._name, value)
        return self.is_repeated(value)

    def feed_all(self, label: str, values: Iterable[tuple[object, Any]], where: str) -> None:
        """Feeds named values in order."""
        self.add(label)
        outer = self._name
        for name, value in values:
            self.add("name", name) if isinstance(name, str) else self.feed(name, where)
            self._name = str(name) if label in _NAMED else ""
            self.feed(value, f"{where}.{name}" if where else str(name))
        self._name = outer
        self.add("end")

    def _container(self, value: Any, where: str) -> bool:
        kind = type(value)
        if kind in _SEQUENCES:
            self.feed_all(kind.__name__, enumerate(value), where)
        elif kind in _MAPPINGS:
            self.feed_all(kind.__name__, value.items(), where)
            self.feed(getattr(value, "default_factory", None), where)
        elif kind in (set, frozenset):
            self._set(value, where)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.add("array", value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest())
        elif isinstance(value, (np.generic, np.dtype)):
            self.add(kind.__name__, repr(value))
        elif isinstance(value, re.Pattern):
            self.add("pattern", value.pattern, value.flags)
        elif isinstance(value, pathlib.PurePath):
            self.add(kind.__name__, value)
        elif isinstance(value, weakref.ref):
            self.add("weak")
            self.feed(value(), where)
        else:
            return False
        return True

    def _set(self, value: Any, where: str) -> None:
        if any(type(item) not in _ATOMS for item in value):
            raise Unkeyable(f"{where} is a set of objects, which have no order")
        self.add(type(value).__name__, *sorted(f"{type(item).__name__} {item!r}" for item in value))

    def _tensor(self, tensor: torch.Tensor, where: str) -> None:
        """Feeds a tensor that is not a parameter or buffer: a trace takes over its values."""
        digest = tensor_digest(tensor)
        if digest is None:
            raise Unkeyable(f"what is in {where}, a {type(tensor).__name__} on {tensor.device}, cannot be read")
        self.add("tensor", digest, tensor.requires_grad, tensor.device.type, tensor.stride())

    def _module(self, module: nn.Module, where: str) -> None:
        self.code.feed(type(module), where)
        members = dict(vars(module))
        for role in (PARAMETERS, BUFFERS):
            self.add(role)
            for name, tensor in members.pop(role, {}).items():
                self._state(name, tensor, f"{where}.{name}" if where else name)
        self.feed_all("members", [item for item in members.items() if item[0] not in IGNORED_MEMBERS], where)

    def _state(self, name: str, tensor: torch.Tensor | None, where: str) -> None:
        """Feeds a parameter or buffer: a trace takes its type, and never its values."""
        self.add(name)
        if tensor is None or self.is_repeated(tensor):
            return
        if gradient_hooks(tensor) or accumulation_hooks(tensor):
            raise Unkeyable(f"{where} has hooks")
        self.add(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter))

    def _object(self, value: Any, where: str) -> None:
        """Feeds an instance of a class written in Python: its attributes, and what it contains."""
        kind = type(value)
        if isinstance(value, _EMPTY):
            self.add("empty", kind.__module__, kind.__qualname__)
            return
        if isinstance(value, _REFUSED) or not (hasattr(value, "__dict__") or _slots(kind)):
            raise Unkeyable(f"{where} is a {kind.__module__}.{kind.__qualname__}, which may hold anything")
        if isinstance(value, functools.partial):
            self.feed((value.func, value.args, value.keywords), where)
        self.code.feed(kind, where)
        self._inherited(value, where)
        members = dict(getattr(value, "__dict__", {}))
        members.update({name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)})
        self.feed_all("members", [item for item in members.items() if item[0] not in IGNORED_MEMBERS], where)

    def _inherited(self, value: Any, where: str) -> None:
        """Feeds what an instance of a subclass of a container or of a number contains."""
        if isinstance(value, dict):
            self.feed(dict(value), where)
        elif isinstance(value, _SEQUENCES):
            self.feed(list(value), where)
        elif isinstance(value, (set, frozenset)):
            self._set(value, where)
        elif isinstance(value, (int, float, complex, str, bytes)):
            plain: Any = next(kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind))
            self.add(repr(plain(value)))


def _slots(kind: type) -> list[str]:
    declared = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]
