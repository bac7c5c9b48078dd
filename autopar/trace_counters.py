"""Plain numbers that a model changes when it is called. A captured graph keeps them as they are at the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FEW = 64
"""Elements of a tensor made of a model's numbers."""


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


def counted(model: nn.Module, call: Callable[[], object], found: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the numbers that a first ``call`` changes, ``found``, a graph of it must not keep: those that a second
    call changes again, or all if the second runs other operations. There are none where a module only fits a number to
    its input before it uses it, as a window to a picture. Runs ``call`` twice."""
    first, second = _Operations(), _Operations()
    with first:
        call()
    before = counters(model)
    with second:
        call()
    return changed(before, counters(model)) if first.seen == second.seen else found


def warn_of_counters(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Numbers in Python are fixed by the trace; nothing counts them on afterwards."""
    warnings.warn(
        f"{type(model).__name__} changes {', '.join(paths)} when it is called, but a captured graph keeps plain "
        'numbers as they are at the first call; what depends on them must be a buffer: self.register_buffer("steps", '
        "torch.zeros((), dtype=torch.int64)) and self.steps.add_(1)",
        stacklevel=3,
    )


class _Operations(TorchDispatchMode):
    """What runs within, with its constants and the shapes of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shown = pytree.tree_map(_described, (args, kwargs or {}))
        self.seen.append(f"{func} {shown}")
        return func(*args, **(kwargs or {}))


def _described(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return str(leaf)
    if type(leaf) is torch.Tensor and leaf.device.type != "meta" and leaf.numel() <= FEW:
        return str(leaf.tolist())
    return f"{leaf.dtype}{list(leaf.shape)}"
