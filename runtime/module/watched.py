"""Says to the watch (:mod:`autopar.runtime.faults.watch`), and to ``torch.profiler``, when the collective methods of a
parallel module begin and end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from autopar.runtime.torch_internals.profiling import span

Class = TypeVar("Class", bound=type)

# Methods that every rank calls together.
_COLLECTIVE = (
    "forward",
    "step",
    "prepare",
    "full_tensor",
    "clip_grad_norm_",
    "local_batch",
    "from_local",
    "set_random_state",
    "set_loss_scale_state",
    "apply",
)


def watched(cls: Class) -> Class:
    """``cls``, whose collective methods are calls of its ``_watch``."""
    for name in _COLLECTIVE:
        setattr(cls, name, _watched(f"model.{name}", getattr(cls, name)))
    return cls


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    name = "model" if name == "model.forward" else name

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_whole:  # Each rank is on its own.
            return method(self, *args, **kwargs)
        with span(f"{name}()"), self._watch.call(f"{name}()"):
            return method(self, *args, **kwargs)

    # Already compiled, so torch.compile(model) has no effect.
    disabled: Callable[..., Any] = torch.compiler.disable(call)
    return disabled if name == "model" else call
