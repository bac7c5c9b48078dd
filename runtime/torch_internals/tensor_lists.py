"""Operations over lists of tensors, which torch names with an underscore ("foreach")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _foreach_utils

FOREACH_NORM: Callable[..., Any] = torch._foreach_norm
"""The function that torch's clipping uses for the norms of a list: ``torch._foreach_norm`` (2.11)."""


def multiply_in_place(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiplies each tensor by ``factor``. Relies on ``torch._foreach_mul_`` (2.11)."""
    torch._foreach_mul_(list(tensors), factor)


def copy_each(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes each value into its target. Relies on ``torch._foreach_copy_`` (2.11)."""
    torch._foreach_copy_(list(targets), list(values))


def each_norm(tensors: Sequence[torch.Tensor], order: float) -> Sequence[torch.Tensor]:
    """The norm of each tensor. Relies on ``torch._foreach_norm`` (2.11)."""
    return torch._foreach_norm(list(tensors), order)


def changes_list(function: Callable[..., Any]) -> bool:
    """Whether ``function`` writes to a list of tensors. Relies on the names ``_foreach_..._`` (2.11)."""
    name = getattr(function, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_")


def allow_in_lists(cls: type[torch.Tensor]) -> None:
    """Lets torch's clipping and optimizers process tensors of ``cls`` in lists, like DTensor, instead of one by one.
    Relies on the list ``_foreach_supported_types`` (2.11)."""
    _foreach_utils._foreach_supported_types.append(cls)
