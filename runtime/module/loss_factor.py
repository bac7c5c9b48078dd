"""The factor of the loss that users pass to :meth:`~autopar.runtime.ParallelModule.step`."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError


def step_scale(model: nn.Module, kwargs: dict[str, Any], scale: Any) -> tuple[dict[str, Any], float]:
    """The keyword inputs of the model and the factor of its loss. If its forward has a parameter called ``scale``, the
    user's value is that input, and the factor is 1. Raises :class:`AutoparError` unless it is a finite number."""
    if _takes_scale(model):
        return kwargs if scale is None else {**kwargs, "scale": scale}, 1.0
    if scale is None:
        return kwargs, 1.0
    is_number = isinstance(scale, (int, float)) or (isinstance(scale, torch.Tensor) and scale.numel() == 1)
    if not is_number or not math.isfinite(float(scale)):
        raise AutoparError(f"step(scale={scale!r}): the factor of the loss must be a finite number, such as 1 / 4")
    return kwargs, float(scale)


def _takes_scale(model: nn.Module) -> bool:
    try:
        return "scale" in inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
