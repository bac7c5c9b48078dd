"""A model and its batch as mixed precision computes them: whatever dtype they are in, in that of the layout."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from autopar.api import Batch, split_batch
from autopar.errors import OptionsError

# What products with weights are computed in.
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
    """A copy of the model's modules whose parameters are of ``dtype`` and take no memory; buffers and inputs of a dtype
    that was converted are converted too. The model itself where nothing differs. Raises :class:`OptionsError` for a
    model that cannot be copied."""
    converted = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != dtype}
    if not converted:
        return model, batch
    known: dict[int, Any] = {id(buffer): _as(buffer, converted, dtype) for buffer in model.buffers()}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, dtype=kind, device="meta")
        known[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    args, kwargs = split_batch(batch)
    named = {name: _as(value, converted, dtype) for name, value in kwargs.items()}
    return _copied(model, known, dtype), named or tuple(_as(value, converted, dtype) for value in args)


def _copied(model: nn.Module, known: dict[int, Any], dtype: torch.dtype) -> nn.Module:
    """A copy of the model with what is ``known`` in its place."""
    try:
        return copy.deepcopy(model, known)
    except Exception as error:  # Whatever the parts of a model raise.
        raise OptionsError(
            f"{type(model).__name__} is to be priced in {dtype}, and cannot be copied to be converted "
            f"({type(error).__name__}: {error}); convert it before (model.to({dtype}), with inputs to match), or take "
            "the precision that it is in"
        ) from error


def _as(value: Any, converted: set[torch.dtype], dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in converted else value
