"""A graph beside eager autograd: the same model, the same inputs, every output, gradient and buffer update
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.trace.tracer import Traced
from tests.helpers.interpret import interpret

Batch = dict[str, Any]
# transformers computes losses in single precision, whatever the model has.
TOLERANCE = 2e-6


def assert_same_step(
    graph: Graph, traced: Traced, model: nn.Module, batch: Batch, loss_of: Callable[[Any], torch.Tensor]
) -> None:
    """Runs ``graph`` (of ``traced``) and the eager model in double precision on ``batch``; raises naming
    the first difference.
    """
    reference = deepcopy(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tensors = {**dict(model.named_parameters()), **buffers, **batch}
    results = interpret(graph, tensors)
    loss = loss_of(reference(**batch))
    loss.backward()
    assert traced.signature.loss is not None
    assert_close("loss", results["output", traced.signature.loss], loss.detach(), 0.0)
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for name, parameter in reference.named_parameters():
        assert_close(f"gradient of {name}", results["gradient", name], parameter.grad, largest)
    updated = {name: value for (kind, name), value in results.items() if kind == "mutation"}
    for name, buffer in reference.named_buffers():
        assert_close(f"buffer {name}", updated.get(name, buffers[name]), buffer, 0.0)


def assert_close(what: str, found: torch.Tensor | None, expected: torch.Tensor | None, scale: float) -> None:
    """Equal up to rounding. Gradients that are zero in exact arithmetic are compared with ``scale``, the
    largest of the model.
    """
    assert (found is None) == (expected is None), f"{what}: {found} instead of {expected}"
    if found is None or expected is None:
        return
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} instead of {expected.dtype}"
    if not expected.is_floating_point():
        assert torch.equal(found, expected), what
        return
    error = float((found - expected).abs().max()) if expected.numel() else 0.0
    bound = TOLERANCE * float(expected.abs().max()) + TOLERANCE * 0.1 * scale if expected.numel() else 0.0
    assert error <= bound, f"{what}: off by {error:.3g}, allowed {bound:.3g}"


def doubled(batch: Mapping[str, Any]) -> Batch:
    """The floating tensors of ``batch`` in double precision."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }
