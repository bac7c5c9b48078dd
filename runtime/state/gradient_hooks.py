"""Hooks that users register on parameters: what autograd does with them, a compiled step does as well.

``register_hook`` sees the gradient of one backward before it is added to ``.grad``: a DTensor placed as the parameter
is. What the hook returns replaces it, in any placement, or as a whole plain tensor, the same on every rank. Plain
tensors in the hook, such as a mask, count as whole tensors that every rank has. After ``.grad`` was added to, the hooks
of ``register_post_accumulate_grad_hook`` run. A step in microbatches runs each hook once, on the gradient of the whole
batch.

Hooks belong to the Python object of a parameter. Registered before ``parallelize``, they go with it to the DTensor
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
    """The dicts that hold the hooks of ``parameter``, to be given to :func:`set_hooks`."""
    return gradient_hooks(parameter), accumulation_hooks(parameter)


def set_hooks(parameter: torch.Tensor, hooks: tuple[Table, Table]) -> None:
    """Makes ``parameter`` have ``hooks``: the very dicts, through which their handles remove them."""
    for found, give in zip(hooks, (set_gradient_hooks, set_accumulation_hooks), strict=True):
        if found is not None:
            give(parameter, found)


def carry_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives the hooks of ``source`` to ``target``, which takes its place."""
    set_hooks(target, hooks_of(source))


def run_hooks(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` after the hooks of ``parameter`` on it, placed as before."""
    for hook in tuple((gradient_hooks(parameter) or {}).values()):
        gradient = _result(_inner(hook), gradient)
    return gradient


def run_post_hooks(parameter: nn.Parameter) -> None:
    """The hooks of ``parameter`` for after its ``.grad`` was added to."""
    for hook in tuple((accumulation_hooks(parameter) or {}).values()):
        _inner(hook)(parameter)


def prepare_hooks(parameter: nn.Parameter, arrives: bool) -> None:
    """Before autograd runs the hooks of ``parameter`` itself: lets them do what :func:`run_hooks` lets them, and
    whether a gradient ``arrives`` at all: torch runs hooks also where there is none."""
    for table, wrapper in zip(hooks_of(parameter), (_OnGradient, _AfterAccumulation), strict=True):
        hooks = table or {}
        for key, hook in tuple(hooks.items()):
            if not isinstance(hook, _Wrapped) and not getattr(hook, "__module__", "").startswith("autopar."):
                hooks[key] = hook = wrapper(hook)
            if isinstance(hook, _Wrapped):
                hook.expects |= arrives


class _Wrapped:
    """A hook as autograd is to call it."""

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
        found = hook(gradient)
        return gradient if found is None else found
    with implicit_replication():
        found = hook(gradient)
        return gradient if found is None else _placed_like(found, gradient, hook)


def _placed_like(found: Any, gradient: DTensor, hook: Any) -> DTensor:
    if not isinstance(found, torch.Tensor) or found.shape != gradient.shape:
        what = f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
        name = getattr(hook, "__qualname__", repr(hook))
        raise AutoparError(
            f"the hook {name} on a parameter returned {what} for a gradient of shape {list(gradient.shape)}: return "
            "a tensor of that shape, whole or a DTensor, or None to leave the gradient as it is"
        )
    mesh, places = gradient.device_mesh, gradient.placements
    if mesh.get_coordinate() is None:  # The gradient of another pipeline stage, of which this rank has nothing.
        return gradient
    if not isinstance(found, DTensor):
        found = DTensor.from_local(found.to(gradient.device), mesh, (Replicate(),) * mesh.ndim, run_check=False)
    if found.placements != places:
        found = found.redistribute(placements=places)
    converted: DTensor = found.to(gradient.dtype)
    return converted
