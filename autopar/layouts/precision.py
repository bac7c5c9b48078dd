"""Converts a model and its batch to the dtype of a layout's precision, without using memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.arguments import Batch, split_batch
from autopar.errors import OptionsError

# The dtype of products with weights.
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of weights and activations under a layout's precision; ``"fp8"`` has them in bf16."""
    return torch.bfloat16 if precision == "fp8" else DTYPES[precision]


def computed_in(model: nn.Module, batch: Batch, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    """A copy of the model's modules whose parameters are of ``dtype`` and take no memory. Buffers and inputs that have
    a converted dtype are converted too. Returns the model itself if nothing differs. Raises :class:`OptionsError` for
    a model that cannot be copied."""
    args, kwargs = split_batch(batch)
    converted, args, kwargs = call_computed_in(model, args, kwargs, dtype)
    return converted, kwargs or args


def call_computed_in(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """:func:`computed_in` for the arguments of a call."""
    old_dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != dtype}
    if not old_dtypes:
        return model, args, dict(kwargs)
    converted: dict[int, Any] = {id(buffer): _as(buffer, old_dtypes, dtype) for buffer in model.buffers()}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, dtype=kind, device="meta")
        converted[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    named = {name: _as(value, old_dtypes, dtype) for name, value in kwargs.items()}
    return _copied(model, converted, dtype), tuple(_as(value, old_dtypes, dtype) for value in args), named


def _copied(model: nn.Module, converted: dict[int, Any], dtype: torch.dtype) -> nn.Module:
    """A copy of the model with its tensors replaced by ``converted``, by the id of the original."""
    try:
        return copy.deepcopy(model, converted)
    except Exception as error:  # The parts of a model may raise anything.
        raise OptionsError(
            f"{type(model).__name__} must be priced in {dtype}, but cannot be copied to be converted "
            f"({type(error).__name__}: {error}); convert it before (model.to({dtype}), with inputs to match), or take "
            "the precision that it is in"
        ) from error


def _as(value: Any, converted: set[torch.dtype], dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in converted else value
