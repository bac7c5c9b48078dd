"""Replaces the tensors of a model while it is traced, and restores them afterwards, also after an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from autopar.torch_internals.modules import buffers_of, parameters_of
from autopar.trace.guards.containers import contents_of, refill

Role = Literal["param", "buffer", "constant"]


@dataclass(frozen=True)
class Slot:
    """An attribute of a module that refers to a tensor."""

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
        """The tensor that it refers to now."""
        value = self._members().get(self.key)
        return value if isinstance(value, torch.Tensor) else None

    def put(self, tensor: torch.Tensor) -> None:
        """Makes it refer to ``tensor``."""
        self._members()[self.key] = tensor


_PLURAL = {"param": "eters", "buffer": "s"}


@dataclass(frozen=True)
class State:
    """One tensor of a model: a parameter, a buffer, or a plain tensor attribute (``constant``), under its first name,
    with every attribute that refers to it."""

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
    by_id: dict[int, tuple[Slot, torch.Tensor, list[str], list[Slot]]] = {}
    for role in ("param", "buffer", "constant"):
        for path, module in model.named_modules(remove_duplicate=False):
            for name, slot, tensor in _members_of(path, module):
                if slot.role == role:
                    _, _, names, slots = by_id.setdefault(id(tensor), (slot, tensor, [], []))
                    slots.append(slot)
                    if role != "constant" or not names:
                        names.append(name)
    return tuple(
        State(first.role, names[0], tensor, tuple(slots), tuple(names[1:]))
        for first, tensor, names, slots in by_id.values()
    )


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores, also after an error, the attributes, members, hooks and caches of every module, and the items of
    containers, also of those inside containers. Changes in objects of other classes stay."""
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
    """Replaces the tensors of ``state`` by ``tensors``. A buffer that forward *re-assigns*
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
    """Maps ``id(module)`` to the module's first path."""
    return {id(module): path for path, module in model.named_modules()}
