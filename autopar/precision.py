"""Precision policies: the dtype in which a step computes, and that in which its parameters are stored.

``"bf16"`` and ``"fp16"`` are what :class:`torch.autocast` does on processors, on every device: products and attention
in 16 bits, losses and a few sensitive operations in float32, everything else in the dtype of its operands. (CUDA's own
lists also widen ``softmax``, ``layer_norm``, ``exp`` and ``pow``, whose results here have the dtype of the operand.)
The parameters, which the optimizer updates, stay float32 (the *masters*), and so do their gradients; the copies that
products read are made once a step (:mod:`autopar.passes.normalise.cast_once`), and collectives move whichever the
placement program finds cheaper. ``"fp16"`` also scales the loss, since gradients below 6e-8 would be zero
(:mod:`autopar.runtime.state.loss_scale`). ``"fp32"`` and None leave the model as it is, whatever dtypes it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from .errors import OptionsError

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
_COMPUTED_IN: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})


def autocast_dtype(precision: Precision | None) -> torch.dtype | None:
    """The dtype in which products are computed under a policy; None for that of their operands."""
    return None if precision is None else _COMPUTED_IN.get(precision)


def scales_loss(precision: Precision | None) -> bool:
    """Whether gradients are those of a scaled loss."""
    return precision == "fp16"


def check_precision(model: nn.Module, precision: Precision | None) -> None:
    """Raises :class:`OptionsError` unless the policy can have float32 masters of all of the model's parameters."""
    if autocast_dtype(precision) is None:
        return
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype == torch.float32:
            continue
        if parameter.dtype in (torch.bfloat16, torch.float16):
            advice = "leave precision out to train it as it is, or give a float32 model (model.float())"
        elif parameter.is_floating_point():
            advice = "give a float32 model (model.float()), or leave precision out"
        elif not parameter.requires_grad:
            continue  # Nothing is multiplied in another dtype: autocast casts floating-point tensors only.
        else:
            advice = "leave precision out: a policy is for real floating-point models"
        name = str(parameter.dtype).removeprefix("torch.")
        raise OptionsError(
            f"precision={precision!r} computes with copies of float32 parameters, but {path!r} is {name}: {advice}"
        )
