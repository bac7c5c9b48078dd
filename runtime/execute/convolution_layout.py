"""Convolutions of compiled pieces in channels-last layout, in which the processor's kernels are fastest.

Inductor chooses that layout too, but ends it behind the last convolution of a graph. Each block of a model is a graph
of its own here, so every block would end with a copy to the other layout, and pooling and the gradients of
normalisations would run in the slow one. Traced in this layout, a value keeps it from block to block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .torch_operations import Operation


def convolutions(device: torch.device) -> Mapping[str, Operation]:
    """The operations to trace convolutions with, by name; none where Inductor's own choice is kept."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return {}
    return {"aten.convolution.default": _forward, "aten.convolution_backward.default": _backward}


def as_traced(value: Tensor) -> Tensor:
    """``value``, an output of the program, in the layout of the uncompiled program's."""
    return value.contiguous() if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) else value


def _channels_last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _forward(value: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    result: Tensor = torch.ops.aten.convolution.default(_channels_last(value), weight, *rest)
    return result


def _backward(gradient: Tensor, value: Tensor, weight: Tensor, *rest: Any) -> Sequence[Tensor | None]:
    """The gradient of the weight has the layout of the weight, which optimizers expect."""
    of_value, of_weight, of_bias = torch.ops.aten.convolution_backward.default(
        _channels_last(gradient), _channels_last(value), weight, *rest
    )
    return of_value, None if of_weight is None else of_weight.contiguous(), of_bias
