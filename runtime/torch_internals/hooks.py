"""The tables in which torch keeps hooks of tensors and of modules: the dicts themselves, through which handles remove
hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

FORWARD_KINDS = ("_forward_hooks", "_forward_pre_hooks")
"""Names of the tables of a module's forward hooks (2.11)."""
BACKWARD_KINDS = ("_backward_hooks", "_backward_pre_hooks")
"""Names of the tables of a module's backward hooks (2.11)."""
KINDS = (*FORWARD_KINDS, *BACKWARD_KINDS)
_WITH_KWARGS = {"_forward_hooks": "_forward_hooks_with_kwargs", "_forward_pre_hooks": "_forward_pre_hooks_with_kwargs"}


_TABLES = attrgetter(*KINDS)


def have_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether one of ``modules`` has hooks of its own. Relies on the tables of :data:`KINDS` (2.11)."""
    return any(chain.from_iterable(map(_TABLES, modules)))


def module_hooks(module: nn.Module, kind: str) -> OrderedDict[int, Any]:
    """The hooks of one of :data:`KINDS` on ``module``. Relies on the attribute of that name (2.11)."""
    hooks: OrderedDict[int, Any] = getattr(module, kind)
    return hooks


def hooks_on_all_modules(kind: str) -> Iterable[Any]:
    """Hooks of one of :data:`KINDS` that ``register_module_...`` put on every module. Relies on
    ``torch.nn.modules.module._global_forward_hooks`` and similar (2.11)."""
    hooks: OrderedDict[int, Any] = getattr(torch_modules, f"_global{kind}")
    return hooks.values()


def forward_pre_hooks(module: nn.Module) -> Iterator[tuple[Any, bool]]:
    """The forward pre-hooks, and whether each takes keyword arguments. Relies on ``_forward_pre_hooks`` and
    ``_forward_pre_hooks_with_kwargs`` (2.11)."""
    for key, hook in module._forward_pre_hooks.items():
        yield hook, key in module._forward_pre_hooks_with_kwargs


def move_hooks(source: nn.Module, target: nn.Module, kind: str, kept: OrderedDict[int, Any]) -> None:
    """Moves the table of ``source`` to ``target``; ``source`` gets the table ``kept``. Relies on the tables of
    :data:`KINDS` and on those that say which hooks take keyword arguments (2.11)."""
    vars(source)[kind], vars(target)[kind] = kept, module_hooks(source, kind)
    if kind in _WITH_KWARGS:
        vars(target)[_WITH_KWARGS[kind]] = vars(source)[_WITH_KWARGS[kind]]
        vars(source)[_WITH_KWARGS[kind]] = OrderedDict(vars(source)[_WITH_KWARGS[kind]])


def move_hook_settings(source: nn.Module, target: nn.Module) -> None:
    """Moves the settings of ``source`` that concern all its hooks to ``target``. Relies on
    ``_forward_hooks_always_called`` and ``_is_full_backward_hook`` (2.11)."""
    vars(target)["_forward_hooks_always_called"] = vars(source)["_forward_hooks_always_called"]
    vars(source)["_forward_hooks_always_called"] = OrderedDict()
    vars(target)["_is_full_backward_hook"] = vars(source)["_is_full_backward_hook"]


def hook_tables(module: nn.Module) -> Iterator[str]:
    """The names of all tables in which a module keeps hooks. Relies on the endings of these names (2.11)."""
    for name, value in vars(module).items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
            yield name


def set_gradient_hooks(tensor: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Sets the table of :func:`gradient_hooks`. Relies on ``Tensor._backward_hooks`` (2.11)."""
    tensor._backward_hooks = hooks


def set_accumulation_hooks(tensor: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Sets the table of :func:`accumulation_hooks`. Relies on ``Tensor._post_accumulate_grad_hooks`` (2.11)."""
    tensor._post_accumulate_grad_hooks = hooks
