"""What torch itself takes to trace a model once: a yardstick for planning on whatever machine measures it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn

from autopar.torch_internals.fake_tensors import FakeTensorMode
from autopar.torch_internals.joint_graphs import export_joint, load_tracer
from autopar.torch_internals.replacements import exporting


class _Loss(nn.Module):
    """The loss of a Hugging Face ``model``, as a function of the inputs of these ``names``."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).loss
        return loss


def trace_seconds(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> float:
    """CPU-seconds in which AOTAutograd traces forward and backward of the whole ``model``, whose loss follows from
    ``batch``, as one graph: on fake tensors of the processor, which the model has from then on, with plain sizes,
    every layer by itself, nothing decomposed. Imports are left out."""
    load_tracer()
    with (mode := FakeTensorMode(allow_non_fake_inputs=True)):
        model.to_empty(device="cpu")
        inputs = [torch.empty_like(tensor, device="cpu") for tensor in batch.values()]
    start = time.process_time()
    with exporting():
        export_joint(mode, _Loss(model, tuple(batch)), inputs, {})
    return time.process_time() - start
