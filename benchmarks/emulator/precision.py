"""Converts a model and its batch to the dtype of a layout's precision, without using memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.arguments import Batch, split_batch
from autopar.errors import OptionsError

# The dtypes of a layout's precisions.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def computed_in(model: nn.Module, batch: Batch, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    """A copy of the model's modules whose parameters are of ``dtype`` and take no memory. Buffers and inputs that have
    a converted dtype are converted too. Returns the model itself if nothing differs. Raises :class:`OptionsError` for
    a model that cannot be copied."""
    conversion = Conversion.of(model, dtype)
    args, kwargs = conversion.of_arguments(*split_batch(batch))
    return conversion.of_model(model), kwargs or args


@dataclass(frozen=True)
class Conversion:
    """What :func:`computed_in` does to a model of parameters in the dtypes ``old``, and to parts of it."""

    old: frozenset[torch.dtype]
    dtype: torch.dtype

    @staticmethod
    def of(model: nn.Module, dtype: torch.dtype) -> Conversion:
        """The conversion of a model to ``dtype``."""
        old = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != dtype)
        return Conversion(frozenset(old), dtype)

    def of_model(self, model: nn.Module) -> nn.Module:
        """The model as :func:`computed_in` returns it."""
        if not self.old:
            return model
        converted: dict[int, Any] = {id(buffer): self._of(buffer) for buffer in model.buffers()}
        for parameter in model.parameters():
            kind = self.dtype if parameter.is_floating_point() else parameter.dtype
            empty = torch.empty_like(parameter, dtype=kind, device="meta")
            converted[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        return _copied(model, converted, self.dtype)

    def of_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call."""
        return tuple(map(self._of, args)), {name: self._of(value) for name, value in kwargs.items()}

    def _of(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and value.dtype in self.old else value


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
