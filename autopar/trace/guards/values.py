"""Records a Python value when a model is traced, and compares the current value with it."""

from __future__ import annotations

import enum
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autopar.content.tensor_digest import tensor_digest
from autopar.torch_internals.tensors import counted_writes

# What a call may take or return in addition to tensors, as a constant of its trace.
CONSTANT_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, slice)
# Types that are compared by equality alone.
PLAIN = (*CONSTANT_TYPES, torch.memory_format, torch.layout, range, np.generic)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# Containers that cannot be changed, such as the stride of a convolution.
_FIXED = (tuple, torch.Size, frozenset)
# Tensors and arrays of at most so many bytes are compared by value at each call: no counter registers writes through
# ``.data`` or an array that shares the memory.
# Chosen: comparing a page takes microseconds.
_COMPARED_BYTES = 4096
# Arrays have no counter of writes at all; larger ones are compared by identity only.
# Chosen: of so many bytes a copy is kept, and compared at each call.
_ARRAY_BYTES = 1 << 20
# At most so many items of a container are compared.
# Chosen, not measured.
_MAX_ITEMS = 100_000
# Characters of a value in a message. Chosen: half a line.
_SHOWN = 60


class _Missing:
    def __repr__(self) -> str:
        return "not there"


MISSING = _Missing()
"""The value of an attribute that does not exist."""


class Expected(ABC):
    """A recorded value. ``immutable``: the same object cannot have changed its value."""

    immutable = True

    @abstractmethod
    def difference(self, now: object, label: str) -> str | None:
        """A sentence that says how ``label``, whose value is ``now``, has changed; None if it has not."""


def shown(value: object) -> str:
    """``value`` as a short line of text, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)} of {value.dtype}"
    if isinstance(value, torch.nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return str(getattr(value, "__qualname__", value))
    if value is not MISSING and not isinstance(value, (*PLAIN, *CONTAINERS)):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def sentence(label: str, old: str, new: str) -> str:
    """The sentence about a difference."""
    if old == new:
        return f"{label} was {old} when traced and is another one"
    return f"{label} was {old} when traced and is {new}"


class Plain(Expected):
    """A number, a string and the like: must be equal and of the same type."""

    def __init__(self, value: object) -> None:
        self._value = value

    def difference(self, now: object, label: str) -> str | None:
        old = self._value
        is_same = type(now) is type(old) and (now == old or (now != now and old != old))
        return None if is_same else sentence(label, shown(old), shown(now))


class Same(Expected):
    """Anything else, compared by identity (methods: by their object and function)."""

    def __init__(self, value: object) -> None:
        self._value = value

    def difference(self, now: object, label: str) -> str | None:
        is_same = now is self._value or (isinstance(now, types.MethodType) and now == self._value)
        return None if is_same else sentence(label, shown(self._value), shown(now))


class Tensor(Expected):
    """A tensor that a graph contains as a constant: must have the same values, in any tensor object."""

    immutable = False

    def __init__(self, value: torch.Tensor) -> None:
        self._text = shown(value)
        self._kind = (type(value), value.shape, value.dtype, value.device)
        self._digest = _digest(value)
        is_small = self._digest is not None and value.numel() * value.element_size() <= _COMPARED_BYTES
        self._copy = value.detach().clone() if is_small else None
        self._seen: tuple[torch.Tensor, int] = value, _version(value)

    def difference(self, now: object, label: str) -> str | None:
        if not isinstance(now, torch.Tensor):
            return sentence(label, self._text, shown(now))
        tensor, version = self._seen
        is_untouched = now is tensor and version >= 0 and _version(now) == version
        if is_untouched and (self._copy is None or torch.equal(now, self._copy)):
            return None
        if (type(now), now.shape, now.dtype, now.device) != self._kind:
            return sentence(label, self._text, shown(now))
        is_same = self._digest is not None and _digest(now) == self._digest
        if not is_same:
            return f"{label} was {self._text} when traced and holds other values now"
        self._seen = now, _version(now)
        return None


class Array(Expected):
    """A numpy array, which a model may turn into a constant."""

    immutable = False

    def __init__(self, value: np.ndarray) -> None:
        self._text, self._value = shown(value), value
        self._kind = value.shape, value.dtype
        is_compared = value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject
        self._bytes = value.tobytes() if is_compared else None

    def difference(self, now: object, label: str) -> str | None:
        if not isinstance(now, np.ndarray) or (now.shape, now.dtype) != self._kind:
            return sentence(label, self._text, shown(now))
        is_same = now is self._value if self._bytes is None else now.tobytes() == self._bytes
        return None if is_same else f"{label} was {self._text} when traced and holds other values now"


class Contents(Expected):
    """A container with its items, in order; a namespace with its attributes."""

    immutable = False

    def __init__(self, value: object, inputs: frozenset[int], enclosing: frozenset[int]) -> None:
        self._text, self._type = shown(value), type(value)
        self._items = {key: (item, freeze(item, inputs, enclosing)) for key, item in items_of(value)}
        if self._type in _FIXED:  # No subclasses: those may have attributes as well.
            self.immutable = all(expected.immutable for _, expected in self._items.values())

    def difference(self, now: object, label: str) -> str | None:
        if type(now) is not self._type:
            return sentence(label, self._text, shown(now))
        count = 0
        for key, item in items_of(now):
            count += 1
            if key not in self._items:
                return sentence(label, self._text, shown(now))
            old, expected = self._items[key]
            if item is old and expected.immutable:
                continue
            change = expected.difference(item, f"{label}[{key!r}]")
            if change is not None:
                return change
        return None if count == len(self._items) else sentence(label, self._text, shown(now))


def items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Pairs of a key or index and its item; the elements of a set are their own keys."""
    if isinstance(container, Mapping):
        return container.items()
    if isinstance(container, (set, frozenset)):
        return ((item, item) for item in container)
    if isinstance(container, types.SimpleNamespace):
        return vars(container).items()
    return enumerate(container)


def freeze(value: object, inputs: frozenset[int] = frozenset(), enclosing: frozenset[int] = frozenset()) -> Expected:
    """Records ``value``, to compare with it later. Containers are copied, with their items. ``inputs`` are the ids of
    tensors whose values are inputs of the graph, ``enclosing`` those of the containers that ``value`` is in."""
    if value is MISSING or isinstance(value, PLAIN):
        return Plain(value)
    if isinstance(value, torch.Tensor) and id(value) not in inputs:
        return Tensor(value)
    if isinstance(value, np.ndarray):
        return Array(value)
    if isinstance(value, (*CONTAINERS, types.SimpleNamespace)) and id(value) not in enclosing and _is_small(value):
        return Contents(value, inputs, enclosing | {id(value)})
    return Same(value)


def _is_small(value: object) -> bool:
    return isinstance(value, types.SimpleNamespace) or len(value) <= _MAX_ITEMS  # type: ignore[arg-type]


def within(value: object) -> Iterator[tuple[str, object]]:
    """Yields the items of a container, and of containers inside it, each with its position (``[0]['beta']``)."""
    waiting: list[tuple[str, object]] = [("", value)]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_ITEMS:
        label, container = waiting.pop()
        if (
            id(container) in seen
            or not isinstance(container, (*CONTAINERS, types.SimpleNamespace))
            or not _is_small(container)
        ):
            continue
        seen.add(id(container))
        for key, item in items_of(container):
            place = f"{label}.{key}" if isinstance(container, types.SimpleNamespace) else f"{label}[{key!r}]"
            yield place, item
            waiting.append((place, item))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else counted_writes(tensor)


def _digest(tensor: torch.Tensor) -> str | None:
    """A hash of a tensor's values, or None if they cannot be read."""
    try:
        return tensor_digest(tensor)
    except RuntimeError:
        return None
