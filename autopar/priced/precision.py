"""The precision in which a model is planned where layouts, and not options, say it."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from autopar.layout import Layout
from autopar.precision import Precision

_NAMES: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def own_precision(model: nn.Module) -> Precision:
    """The dtype of most elements of a model's parameters, of those in which layouts are computed."""
    elements = Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] += parameter.numel()
    return _NAMES.get(max(elements, key=elements.__getitem__, default=torch.float32), "fp32")


def is_single(model: nn.Module) -> bool:
    """Whether a precision can be chosen for the model: all its parameters are in fp32."""
    return all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())


def policy_for(model: nn.Module, precision: Precision | None) -> Precision | None:
    """The option for a model that is to compute in ``precision``, by default that of layouts: None if it is in that
    dtype as it is, or in 16 bits and no precision is named."""
    if precision is None:
        return Layout().precision if is_single(model) else None
    return None if precision != "fp32" and precision == own_precision(model) else precision
