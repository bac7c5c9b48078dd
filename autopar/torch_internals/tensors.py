"""Tensors and their memory."""

from __future__ import annotations

from typing import Any

import torch

# The memory format that torch's own decompositions and AOTAutograd assume for a tensor (2.11).
from torch._prims_common import suggest_memory_format

__all__ = [
    "accumulation_hooks",
    "as_parameter",
    "counted_writes",
    "gradient_hooks",
    "is_view",
    "storage_key",
    "suggest_memory_format",
    "wrapper_subclass",
]


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that identifies ``storage`` among all that exist. It works for fake tensors, whose addresses are all 0.
    Relies on ``_cdata``, the address of the C++ object (2.11)."""
    return int(storage._cdata)


def counted_writes(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to in place. Relies on ``Tensor._version``, which an inference tensor lacks
    (2.11)."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd made ``tensor`` as a view of another. Relies on ``Tensor._is_view`` (2.11)."""
    return tensor._is_view()


def wrapper_subclass(cls: type, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A tensor of class ``cls`` without memory of its own. Relies on ``Tensor._make_wrapper_subclass``, which
    "Extending PyTorch" names (2.11)."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of a class of its own, which takes part in nothing yet, as a parameter: itself, where
    ``nn.Parameter`` would copy it. Relies on the flag ``_is_param``, by which these count as parameters (2.11)."""
    tensor._is_param = True
    return tensor


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """The hooks of ``register_hook``; None if there never were any. Relies on ``Tensor._backward_hooks`` (2.11)."""
    hooks: dict[int, Any] | None = tensor._backward_hooks
    return hooks


def accumulation_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """The hooks of ``register_post_accumulate_grad_hook``; None if there never were any. Relies on
    ``Tensor._post_accumulate_grad_hooks`` (2.11)."""
    hooks: dict[int, Any] | None = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return hooks
