"""What :func:`autopar.verify` looks at besides the first loss and its gradients: later steps with an optimizer, what
they leave in parameters and buffers, and an evaluation after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from .tolerance import APART, Closeness

# Plain steps: a method that divides by the size of a gradient would make much of those that are zero but for rounding.
# Chosen: the defaults of torch.optim.SGD's rate, and the usual momentum.
RATE, MOMENTUM = 1e-3, 0.9

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Later:
    """What is there after ``steps``: the loss of each, whole ``buffers``, and if there are several steps the whole
    ``parameters``, as they were ``before``, and the outputs of an ``evaluation``."""

    losses: tuple[torch.Tensor, ...]
    buffers: Tensors = field(default_factory=dict)
    before: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    evaluation: Tensors = field(default_factory=dict)


def train(
    first: torch.Tensor, optimizer: torch.optim.Optimizer, step: Callable[[], torch.Tensor], steps: int
) -> tuple[torch.Tensor, ...]:
    """The losses of ``steps``: the ``first`` one, whose gradients are there, and those after it."""
    losses = [first.detach().cpu()]
    optimizer.step()
    for _ in range(steps - 1):
        optimizer.zero_grad()
        losses.append(step().detach().cpu())
        optimizer.step()
    return tuple(losses)


@dataclass(frozen=True)
class LaterErrors:
    """Errors by what they are of: ``loss of step 2``, ``parameter h.0.weight after 3 steps``, ``buffer
    norm.running_mean``, ``evaluation, output 0``. As in :class:`autopar.verification.report.Report`."""

    errors: Mapping[str, float]

    @property
    def worst(self) -> list[tuple[str, float]]:
        return sorted(self.errors.items(), key=lambda item: -item[1] if item[1] == item[1] else -math.inf)


def compare_later(found: Later, alone: Later, exact: Later | None, asked: Closeness) -> LaterErrors:
    """``found`` under a plan compared with one process, of which ``exact`` is in the other width."""
    errors: dict[str, float] = {}
    losses = exact.losses if exact else (None,) * len(alone.losses)
    for number, (one, other, known) in enumerate(zip(found.losses, alone.losses, losses, strict=True), 1):
        if number > 1:
            errors[f"loss of step {number}"] = asked.loss_error(one, other, known)
    for name in sorted({*found.parameters, *alone.parameters}):
        known = exact.parameters.get(name) if exact else None
        start = alone.before.get(name)
        error = _error(found.parameters.get(name), alone.parameters.get(name), known, start, asked)
        errors[f"parameter {name} after {len(alone.losses)} steps"] = error
    for name in sorted({*found.buffers, *alone.buffers}):
        known = exact.buffers.get(name) if exact else None
        errors[f"buffer {name}"] = _error(found.buffers.get(name), alone.buffers.get(name), known, None, asked)
    for name in sorted({*found.evaluation, *alone.evaluation}):
        known = exact.evaluation.get(name) if exact else None
        error = _error(found.evaluation.get(name), alone.evaluation.get(name), known, None, asked)
        errors[f"evaluation, output {name}"] = error
    return LaterErrors(errors)


def _error(
    found: torch.Tensor | None,
    alone: torch.Tensor | None,
    exact: torch.Tensor | None,
    before: torch.Tensor | None,
    asked: Closeness,
) -> float:
    """max|a - b| over the largest change since ``before`` (without one, the largest element), or over what rounding of
    the value itself and of how it was computed allow, whichever is more. Whole numbers must be equal."""
    if found is None or alone is None or found.shape != alone.shape:
        return math.inf
    if not alone.numel():
        return 0.0
    if not (alone.is_floating_point() or alone.is_complex()):
        return 0.0 if torch.equal(found.to(alone.dtype), alone) else math.inf
    one, other = found.to(torch.complex128), alone.to(torch.complex128)
    if torch.equal(torch.view_as_real(one).nan_to_num(), torch.view_as_real(other).nan_to_num()):
        return 0.0
    error = float((one - other).abs().max())
    size = float(other.abs().max())
    changed = size if before is None else float((other - before.to(torch.complex128)).abs().max())
    rounding = max(size * (asked.unit if asked.always else torch.finfo(alone.dtype).eps), asked.off(alone, exact))
    divisor = max(changed, APART * rounding / asked.tolerance)
    return error / divisor if divisor else math.inf
