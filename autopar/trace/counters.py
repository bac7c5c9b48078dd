"""Plain numbers that a model changes when it is called. A captured graph contains their values at the first call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from autopar.content.tensor_digest import tensor_digest
from autopar.torch_internals.fake_tensors import FakeTensor
from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.modules import is_about_flat_weights
from autopar.torch_internals.tensors import storage_key
from autopar.torch_internals.trees import tree_map
from autopar.trace.guards.containers import contents_of, refill

# The mode, members and hooks of any module.
_OWN = frozenset(vars(nn.Module()))


def counters(model: nn.Module) -> dict[str, float]:
    """The plain numbers among the attributes of modules, by path, without flags."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules()
        for key, value in module.__dict__.items()
        if type(value) in (int, float)
    }


def changed(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[str, ...]:
    """The paths of :func:`counters` whose numbers have changed."""
    return tuple(path for path, value in before.items() if after.get(path, value) != value)


@dataclass(frozen=True)
class ModuleAttributes:
    """The attributes of one module after a call, without tensors, and the containers among them with their items."""

    values: Mapping[str, object]
    contents: Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class CallRecord:
    """The operations of a call, with loss and backward, and the state of the modules after it: plain numbers by path,
    and attributes in the order of the modules."""

    operations: Sequence[str]
    numbers: Mapping[str, float]
    attributes: Sequence[ModuleAttributes]


class RunCall(Protocol):
    """Calls a model in its state before the trace, except for the ``attributes`` of its modules if any are given, in
    the traced mode or in the other one."""

    def __call__(self, attributes: Sequence[ModuleAttributes], *, other_mode: bool) -> CallRecord: ...


def counted(run: RunCall, changed_numbers: tuple[str, ...], refilled: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the numbers (``changed_numbers``) and containers (``refilled``) that a first call changes a graph must
    not contain as constants: the numbers that a second call changes again; or all, if the second call, or one in the
    other mode, runs other operations than it would have without the first. There are none where a module only fits a
    number to its input before it uses it, as a window to a picture, or keeps a record in a list."""
    first = run((), other_mode=False)
    second = run(first.attributes, other_mode=False)
    other, later = run((), other_mode=True), run(first.attributes, other_mode=True)
    is_same = first.operations == second.operations and other.operations == later.operations
    return changed(first.numbers, second.numbers) if is_same else (*changed_numbers, *refilled)


def containers(model: nn.Module) -> dict[str, list[tuple[Any, Any]]]:
    """The containers among the attributes of modules, by path, each with the containers inside it, and copies of
    all."""
    return {
        f"{path}.{key}" if path else key: contents
        for path, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in _OWN and not is_about_flat_weights(module, key) and (contents := contents_of([value]))
    }


def refilled(before: Mapping[str, Sequence[tuple[Any, Any]]], model: nn.Module) -> tuple[str, ...]:
    """The paths of :func:`containers` whose items, or which themselves, have changed."""
    after = containers(model)
    return tuple(path for path, contents in before.items() if not _are_same(contents, after.get(path, ())))


def _are_same(before: Sequence[tuple[Any, Any]], after: Sequence[tuple[Any, Any]]) -> bool:
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(a is b and _ids_in(old) == _ids_in(new) for (a, old), (b, new) in pairs)


def _ids_in(container: Any) -> list[int]:
    """The ids of the items of a container."""
    if isinstance(container, dict):
        return [id(part) for item in container.items() for part in item]
    return [id(item) for item in container]


def attributes_of(model: nn.Module) -> list[ModuleAttributes]:
    """What a call may leave in each module for the next, except tensors."""
    return [_module_attributes(vars(module)) for module in model.modules()]


def _module_attributes(attributes: Mapping[str, object]) -> ModuleAttributes:
    values = {k: value for k, value in attributes.items() if k not in _OWN and not isinstance(value, torch.Tensor)}
    return ModuleAttributes(values, contents_of(values.values()))


def with_attributes(model: nn.Module, attributes: Sequence[ModuleAttributes]) -> None:
    """Restores in each module what :func:`attributes_of` returned, if anything. Containers stay the same objects, since
    modules may share them."""
    for module, saved in zip(model.modules(), attributes, strict=False):
        module.__dict__.update(saved.values)
        for container, entries in saved.contents:
            refill(container, entries)


def warn_of_counters(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Warns of numbers in Python that the trace fixes: nothing updates them afterwards."""
    warnings.warn(
        f"{type(model).__name__} changes {', '.join(paths)} when it is called, but a captured graph keeps plain "
        "attributes, and what is in lists and objects, as they are at the first call; what depends on them must be a "
        'buffer: self.register_buffer("steps", torch.zeros((), dtype=torch.int64)) and self.steps.add_(1)',
        stacklevel=3,
    )


class Operations(TorchDispatchMode):
    """Records what runs: each operation with its constants, and which tensors it takes and returns. Tensors are
    numbered, ``inputs`` first, so that two runs are equal only if they compute the same."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        for tensor in inputs:
            self._number(tensor)

    def add(self, tree: Any) -> None:
        """Adds ``tree`` to what ran."""
        self.seen.append(str(tree_map(self._described, tree)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.add((str(func), args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result

    def _described(self, leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        shown = f"#{self._number(leaf)} {leaf.dtype}{list(leaf.shape)}{leaf.stride()}{leaf.storage_offset()}"
        if isinstance(leaf, FakeTensor):
            return shown
        digest = tensor_digest(leaf)
        if digest is None:
            raise TypeError(f"the values of a {type(leaf).__name__} cannot be read")
        return f"{shown} {digest}"

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        # Kept alive: the address of a deleted storage may be reused.
        return self._storages.setdefault(storage_key(storage), (len(self._storages), storage))[0]
