"""Modes: code that torch runs instead of its functions and operators."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.overrides import _get_current_function_mode_stack

# Documented in "Extending PyTorch", where it is imported from this private module (2.11).
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

__all__ = [
    "TorchDispatchMode",
    "function_modes",
    "is_any_mode_active",
    "without_dispatch_modes",
    "without_torch_function",
]


def is_any_mode_active() -> bool:
    """Whether a mode intercepts functions or operators. Relies on the two stacks of modes,
    ``_get_current_function_mode_stack`` and ``_get_current_dispatch_mode_stack`` (2.11)."""
    return bool(_get_current_function_mode_stack() or _get_current_dispatch_mode_stack())


def function_modes() -> list[object]:
    """The modes that intercept functions, the innermost last. Relies on ``_get_current_function_mode_stack`` (2.11)."""
    return list(_get_current_function_mode_stack())


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Runs operators as if no dispatch mode were active. Relies on ``_disable_current_modes`` (2.11)."""
    return _disable_current_modes()


def without_torch_function() -> AbstractContextManager[None]:
    """Disables ``__torch_function__`` of tensor subclasses; modes are still called. Relies on
    ``torch._C.DisableTorchFunctionSubclass`` (2.11)."""
    return torch._C.DisableTorchFunctionSubclass()
