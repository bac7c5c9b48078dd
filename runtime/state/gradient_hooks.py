"""Runs hooks that users register on parameters in compiled steps, as autograd does.

A hook of ``register_hook`` gets the gradient of one backward before it is added to ``.grad``: a DTensor with the
parameter's placements. Its return value replaces the gradient; it may have any placements, or be a whole plain tensor
that is the same on every rank. Plain tensors in the hook, such as a mask, are treated as replicated. The hooks of
``register_post_accumulate_grad_hook`` run after the gradient was added to ``.grad``. A step in microbatches runs each
hook once, on the gradient of the whole batch.

Hooks belong to the Python object of a parameter. Hooks registered before ``parallelize`` are moved to the DTensor
(:func:`carry_hooks`), and their handles still remove them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication

from autopar.errors import AutoparError
from autopar.runtime.torch_internals.hooks import set_accumulation_hooks, set_gradient_hooks
from autopar.torch_internals.tensors import accumulation_hooks, gradient_hooks

Table = dict[int, Any] | None


def hooks_of(parameter: torch.Tensor) -> tuple[Table, Table]:
    """The dicts of the hooks of ``parameter``, for :func:`set_hooks`."""
    return gradient_hooks(parameter), accumulation_hooks(parameter)


def set_hooks(parameter: torch.Tensor, hooks: tuple[Table, Table]) -> None:
    """Sets the ``hooks`` of ``parameter``: the dicts themselves, through which their handles remove them."""
    for table, set_table in zip(hooks, (set_gradient_hooks, set_accumulation_hooks), strict=True):
        if table is not None:
            set_table(parameter, table)


def carry_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Moves the hooks of ``source`` to ``target``, which replaces it."""
    set_hooks(target, hooks_of(source))


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` has hooks of either kind."""
    return bool(gradient_hooks(parameter) or accumulation_hooks(parameter))


def run_hooks(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Applies the hooks of ``parameter`` to ``gradient``, and keeps its placements."""
    for hook in tuple((gradient_hooks(parameter) or {}).values()):
        gradient = _result(_inner(hook), gradient)
    return gradient


def run_post_hooks(parameter: nn.Parameter) -> None:
    """Runs the post-accumulation hooks of ``parameter``."""
    for hook in tuple((accumulation_hooks(parameter) or {}).values()):
        _inner(hook)(parameter)


def prepare_hooks(parameter: nn.Parameter, arrives: bool) -> None:
    """Wraps the hooks of ``parameter`` before autograd runs them, so that they behave as in :func:`run_hooks`.
    ``arrives``: whether there is a gradient; torch runs hooks also if there is none."""
    for table, wrapper in zip(hooks_of(parameter), (_OnGradient, _AfterAccumulation), strict=True):
        hooks = table or {}
        for key, hook in tuple(hooks.items()):
            if not isinstance(hook, _Wrapped) and not getattr(hook, "__module__", "").startswith("autopar."):
                hooks[key] = hook = wrapper(hook)
            if isinstance(hook, _Wrapped):
                hook.expects |= arrives


class _Wrapped:
    """A user's hook, wrapped for autograd."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.expects = False


class _OnGradient(_Wrapped):
    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else _result(self.function, gradient)


class _AfterAccumulation(_Wrapped):
    def __call__(self, parameter: nn.Parameter) -> None:
        arrived, self.expects = self.expects, False
        if arrived:
            self.function(parameter)


def _inner(hook: Any) -> Callable[[Any], Any]:
    return hook.function if isinstance(hook, _Wrapped) else hook


def _result(hook: Callable[[Any], Any], gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        result = hook(gradient)
        return gradient if result is None else result
    with implicit_replication():
        result = hook(gradient)
        return gradient if result is None else _placed_like(result, gradient, hook)


def _placed_like(result: Any, gradient: DTensor, hook: Any) -> DTensor:
    if not isinstance(result, torch.Tensor) or result.shape != gradient.shape:
        returned = f"shape {list(result.shape)}" if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"
        name = getattr(hook, "__qualname__", repr(hook))
        raise AutoparError(
            f"the hook {name} on a parameter returned {returned} for a gradient of shape {list(gradient.shape)}: "
            "return a tensor of that shape, whole or a DTensor, or None to leave the gradient unchanged"
        )
    mesh, places = gradient.device_mesh, gradient.placements
    if mesh.get_coordinate() is None:  # The gradient of another pipeline stage, which is empty on this rank.
        return gradient
    if not isinstance(result, DTensor):
        result = DTensor.from_local(result.to(gradient.device), mesh, (Replicate(),) * mesh.ndim, run_check=False)
    if result.placements != places:
        result = result.redistribute(placements=places)
    converted: DTensor = result.to(gradient.dtype)
    return converted
