"""A model whose tensors are exchanged for stand-ins while it is traced, and put back afterwards whatever
happens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from autopar.torch_internals.modules import buffers_of, parameters_of

Role = Literal["param", "buffer", "constant"]
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


@dataclass(frozen=True)
class Slot:
    """One place in a module that refers to a tensor."""

    module: nn.Module
    role: Role
    key: str

    def _members(self) -> dict[str, Any]:
        return (
            self.module.__dict__
            if self.role == "constant"
            else self.module.__dict__[f"_{self.role}{_PLURAL[self.role]}"]
        )

    def get(self) -> torch.Tensor | None:
        """What the place holds now."""
        found = self._members().get(self.key)
        return found if isinstance(found, torch.Tensor) else None

    def put(self, tensor: torch.Tensor) -> None:
        """Makes the place refer to ``tensor``."""
        self._members()[self.key] = tensor


_PLURAL = {"param": "eters", "buffer": "s"}


@dataclass(frozen=True)
class State:
    """One tensor of a model: a parameter, a buffer, or a plain tensor attribute (``constant``), under its
    first name, with every place that refers to it."""

    role: Role
    name: str
    tensor: torch.Tensor
    slots: tuple[Slot, ...]
    aliases: tuple[str, ...]


def _members_of(path: str, module: nn.Module) -> Iterator[tuple[str, Slot, torch.Tensor]]:
    prefix = f"{path}." if path else ""
    roles: tuple[tuple[Role, Mapping[str, Any]], ...] = (
        ("param", parameters_of(module)),
        ("buffer", buffers_of(module)),
        ("constant", module.__dict__),
    )
    for role, members in roles:
        for key, tensor in members.items():
            if isinstance(tensor, torch.Tensor):
                yield prefix + key, Slot(module, role, key), tensor


def model_state(model: nn.Module) -> tuple[State, ...]:
    """Every distinct tensor of the model: parameters first, then buffers, then constants, each in order of
    first appearance.
    """
    found: dict[int, tuple[Slot, torch.Tensor, list[str], list[Slot]]] = {}
    for role in ("param", "buffer", "constant"):
        for path, module in model.named_modules(remove_duplicate=False):
            for name, slot, tensor in _members_of(path, module):
                if slot.role == role:
                    _, _, names, slots = found.setdefault(id(tensor), (slot, tensor, [], []))
                    slots.append(slot)
                    if role != "constant" or not names:
                        names.append(name)
    return tuple(
        State(first.role, names[0], tensor, tuple(slots), tuple(names[1:]))
        for first, tensor, names, slots in found.values()
    )


def contents_of(values: Iterable[object]) -> list[tuple[Any, Any]]:
    """The containers among ``values`` and within them, each with a copy: members, hooks, what a model remembers."""
    found: dict[int, tuple[Any, Any]] = {}
    left: deque[Any] = deque(values)
    while left:
        value = left.popleft()
        if type(value) in _CONTAINERS and id(value) not in found:
            found[id(value)] = (value, copy(value))
            left.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is tuple:
            left.extend(value)
    return list(found.values())


def refill(container: Any, saved: Any) -> None:
    """Makes ``saved``, see :func:`contents_of`, what ``container`` has in it."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(saved)
    else:
        container.update(saved)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, every module has its old attributes, members, hooks and caches afterwards, and
    containers, also those in containers, what they held. Objects of other classes keep what was changed in them."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    contents = contents_of(value for members in attributes for value in members.values())
    try:
        yield
    finally:
        for module, saved in zip(modules, attributes, strict=True):
            module.__dict__.clear()
            module.__dict__.update(saved)
        for container, entries in contents:
            refill(container, entries)


@contextmanager
def exchanged(model: nn.Module, state: Sequence[State], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """The model with ``tensors`` in the places of ``state``. A buffer that forward *re-assigns*
    (``self.step = self.step + 1``) counts as updated in place, so that the graph returns its new value."""
    with unchanged(model):
        for entry, tensor in zip(state, tensors, strict=True):
            for slot in entry.slots:
                slot.put(tensor)
        yield
        for entry, tensor in zip(state, tensors, strict=True):
            current = entry.slots[0].get()
            if entry.role == "buffer" and current is not None and current is not tensor:
                tensor.copy_(current)


def module_paths(model: nn.Module) -> dict[int, str]:
    """``id(module)`` to its first path."""
    return {id(module): path for path, module in model.named_modules()}
