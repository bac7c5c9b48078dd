"""Plain numbers that a model changes when it is called. A captured graph keeps them as they are at the first call."""

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

from .model_state import contents_of, refill

# The mode, members and hooks of any module.
_OWN = frozenset(vars(nn.Module()))


def counters(model: nn.Module) -> dict[str, float]:
    """The plain numbers among the attributes of modules, by path. Flags are none."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules()
        for key, value in module.__dict__.items()
        if type(value) in (int, float)
    }


def changed(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[str, ...]:
    """The paths of :func:`counters` whose numbers are others now."""
    return tuple(path for path, value in before.items() if after.get(path, value) != value)


@dataclass(frozen=True)
class Left:
    """The attributes of one module after a call, without tensors, and the containers among them with what was in
    them."""

    values: Mapping[str, object]
    contents: Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class Ran:
    """What a call ran, with loss and backward, and what was in the modules after it: plain numbers by path, and
    attributes in the order of the modules."""

    operations: Sequence[str]
    numbers: Mapping[str, float]
    attributes: Sequence[Left]


class Run(Protocol):
    """Calls a model as it was before the trace, but for the ``attributes`` of its modules if there are any, in the mode
    that is traced or in the other one."""

    def __call__(self, attributes: Sequence[Left], *, other_mode: bool) -> Ran: ...


def counted(run: Run, found: tuple[str, ...], refilled: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the numbers that a first call changes, ``found``, and of the containers, ``refilled``, a graph of it
    must not keep: numbers that a second call changes again, or all if the second, or one in the other mode, runs other
    operations than it would have without the first. There are none where a module only fits a number to its input
    before it uses it, as a window to a picture, or keeps a record in a list."""
    first = run((), other_mode=False)
    second = run(first.attributes, other_mode=False)
    other, later = run((), other_mode=True), run(first.attributes, other_mode=True)
    is_same = first.operations == second.operations and other.operations == later.operations
    return changed(first.numbers, second.numbers) if is_same else (*found, *refilled)


def containers(model: nn.Module) -> dict[str, list[tuple[Any, Any]]]:
    """The containers among the attributes of modules, by path, each with those in it and with copies of all."""
    return {
        f"{path}.{key}" if path else key: found
        for path, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in _OWN and not is_about_flat_weights(module, key) and (found := contents_of([value]))
    }


def refilled(before: Mapping[str, Sequence[tuple[Any, Any]]], model: nn.Module) -> tuple[str, ...]:
    """The paths of :func:`containers` that hold something else now, or are others."""
    after = containers(model)
    return tuple(path for path, found in before.items() if not _are_same(found, after.get(path, ())))


def _are_same(before: Sequence[tuple[Any, Any]], after: Sequence[tuple[Any, Any]]) -> bool:
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(a is b and _held(old) == _held(new) for (a, old), (b, new) in pairs)


def _held(container: Any) -> list[int]:
    """The identities of what is in a container."""
    if isinstance(container, dict):
        return [id(part) for item in container.items() for part in item]
    return [id(item) for item in container]


def attributes_of(model: nn.Module) -> list[Left]:
    """What a call may leave in each module for the next, besides tensors."""
    return [_left(vars(module)) for module in model.modules()]


def _left(attributes: Mapping[str, object]) -> Left:
    values = {k: value for k, value in attributes.items() if k not in _OWN and not isinstance(value, torch.Tensor)}
    return Left(values, contents_of(values.values()))


def with_attributes(model: nn.Module, attributes: Sequence[Left]) -> None:
    """Gives each module what :func:`attributes_of` found, if that is anything. Containers stay the same objects, since
    modules may share them."""
    for module, left in zip(model.modules(), attributes, strict=False):
        module.__dict__.update(left.values)
        for container, entries in left.contents:
            refill(container, entries)


def warn_of_counters(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Numbers in Python are fixed by the trace; nothing counts them on afterwards."""
    warnings.warn(
        f"{type(model).__name__} changes {', '.join(paths)} when it is called, but a captured graph keeps plain "
        "attributes, and what is in lists and objects, as they are at the first call; what depends on them must be a "
        'buffer: self.register_buffer("steps", torch.zeros((), dtype=torch.int64)) and self.steps.add_(1)',
        stacklevel=3,
    )


class Operations(TorchDispatchMode):
    """What runs within: each operation with its constants, and which tensors it takes and makes. Tensors are told by
    number, those of ``known`` first, so that two runs are equal only if they compute the same."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        for tensor in known:
            self._number(tensor)

    def note(self, tree: Any) -> None:
        """Counts ``tree`` as part of what ran."""
        self.seen.append(str(tree_map(self._described, tree)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note((str(func), args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result

    def _described(self, leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        shown = f"#{self._number(leaf)} {leaf.dtype}{list(leaf.shape)}{leaf.stride()}{leaf.storage_offset()}"
        if isinstance(leaf, FakeTensor):
            return shown
        found = tensor_digest(leaf)
        if found is None:
            raise TypeError(f"what a {type(leaf).__name__} has in it is not known")
        return f"{shown} {found}"

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        # Kept: the address of one that is gone may be another's.
        return self._storages.setdefault(storage_key(storage), (len(self._storages), storage))[0]
