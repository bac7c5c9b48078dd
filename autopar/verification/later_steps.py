"""What :func:`autopar.verify` compares in addition to the first loss and its gradients: later steps with an optimizer,
the parameters and buffers after them, and an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from .tolerance import APART, MOST_MOVED, MOST_OF_NOISE, Closeness, distance, finite, largest

# Plain SGD: a method that divides by the size of a gradient would amplify those that are zero but for rounding.
# Chosen: the defaults of torch.optim.SGD's rate, and the usual momentum.
RATE, MOMENTUM = 1e-3, 0.9

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LaterSteps:
    """The state after ``steps``: the loss of each, whole ``buffers``, and if there are several steps the whole
    ``parameters``, those ``before`` the steps, and the outputs of an ``evaluation``."""

    losses: tuple[torch.Tensor, ...]
    buffers: Tensors = field(default_factory=dict)
    before: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    evaluation: Tensors = field(default_factory=dict)


def train(
    first: torch.Tensor, optimizer: torch.optim.Optimizer, step: Callable[[], torch.Tensor], steps: int
) -> tuple[torch.Tensor, ...]:
    """The losses of ``steps`` steps: the ``first``, whose gradients are already computed, and those after it."""
    losses = [first.detach().cpu()]
    optimizer.step()
    for _ in range(steps - 1):
        optimizer.zero_grad()
        losses.append(step().detach().cpu())
        optimizer.step()
    return tuple(losses)


@dataclass(frozen=True)
class LaterErrors:
    """Errors by what was compared: ``loss of step 2``, ``parameter h.0.weight after 3 steps``, ``buffer
    norm.running_mean``, ``evaluation, output 0``. As in :class:`autopar.verification.report.Report`. ``doubtful``:
    buffers that are too far apart, though by no more than rounding may do."""

    errors: Mapping[str, float]
    doubtful: tuple[str, ...] = ()

    @property
    def worst(self) -> list[tuple[str, float]]:
        return sorted(self.errors.items(), key=lambda item: -item[1] if item[1] == item[1] else -math.inf)


def compare_later(
    actual: LaterSteps,
    reference: LaterSteps,
    exact: LaterSteps | None,
    closeness: Closeness,
    noisy: Collection[str] = (),
    moved: Mapping[str, float] | None = None,
) -> LaterErrors:
    """Compares the steps under a plan (``actual``) with those of one process (``reference``); ``exact`` are the latter
    in the other floating-point width. Parameters whose first gradients are nothing but rounding (``noisy``) count
    against what changed most of all, if rounding is all that later steps change them by, too. ``moved``: how far
    rounding alone moves the first gradients and the buffers under the plan, where it was measured
    (:mod:`.perturbation`)."""
    changes = (_change(value, reference.before.get(name)) for name, value in reference.parameters.items())
    most = max(changes, default=0.0)
    errors, measured = dict[str, float](), finite(moved)
    losses = exact.losses if exact else (None,) * len(reference.losses)
    for number, (loss, expected, precise) in enumerate(zip(actual.losses, reference.losses, losses, strict=True), 1):
        if number > 1:
            errors[f"loss of step {number}"] = closeness.loss_error(loss, expected, precise)
    for name in sorted({*actual.parameters, *reference.parameters}):
        precise = exact.parameters.get(name) if exact else None
        start, alone = reference.before.get(name), reference.parameters.get(name)
        least = most if name in noisy and _changes_by_rounding(alone, precise, start, closeness) else 0.0
        change = 0.0 if alone is None else _change(alone, start)
        far = _moved_by_steps(measured.get(name, 0.0), len(reference.losses), change)
        error = _error(actual.parameters.get(name), alone, precise, start, closeness, least, far)
        errors[f"parameter {name} after {len(reference.losses)} steps"] = error
    of_buffers, doubtful = _buffer_errors(
        actual.buffers, reference.buffers, exact.buffers if exact else {}, closeness, measured
    )
    errors |= of_buffers
    for name in sorted({*actual.evaluation, *reference.evaluation}):
        precise = exact.evaluation.get(name) if exact else None
        error = _error(actual.evaluation.get(name), reference.evaluation.get(name), precise, None, closeness)
        errors[f"evaluation, output {name}"] = error
    return LaterErrors(errors, doubtful)


def _buffer_errors(
    actual: Tensors, reference: Tensors, exact: Tensors, closeness: Closeness, moved: Mapping[str, float]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The errors of buffers, as they are reported, and the names of those in doubt."""
    errors, doubtful, scale = dict[str, float](), list[str](), _largest_computed(reference, exact)
    for name in sorted({*actual, *reference}):
        found, alone, precise = actual.get(name), reference.get(name), exact.get(name)
        may_be_rounding = _may_be_rounding(found, alone, precise, scale, closeness)
        far = moved.get(name, 0.0) if may_be_rounding else 0.0
        error = _error(found, alone, precise, None, closeness, rounded=far)
        errors[f"buffer {name}"] = error
        if may_be_rounding and not error <= closeness.tolerance:
            doubtful.append(name)
    return errors, tuple(doubtful)


def _may_be_rounding(
    actual: torch.Tensor | None,
    reference: torch.Tensor | None,
    exact: torch.Tensor | None,
    scale: float,
    closeness: Closeness,
) -> bool:
    """Whether rounding may explain the difference of a buffer (the mean of what a norm has centred): no more than the
    tolerance of ``scale``, as of the largest gradient."""
    if actual is None or reference is None or actual.shape != reference.shape or not reference.is_floating_point():
        return False
    small = distance(actual, reference) <= closeness.tolerance * scale
    return small and closeness.in_doubt(actual, reference, exact, closeness.rounding_error(reference, exact))


def _largest_computed(buffers: Tensors, exact: Tensors) -> float:
    """The largest element of all buffers that a step computes, which rounding shows. Constants may be far larger, or
    infinite (masks)."""
    floats = {name: value for name, value in buffers.items() if value.is_floating_point() and name in exact}
    computed = (value for name, value in floats.items() if 0.0 < distance(value, exact[name]) < math.inf)
    return max(map(largest, computed), default=0.0)


def _error(
    actual: torch.Tensor | None,
    reference: torch.Tensor | None,
    exact: torch.Tensor | None,
    before: torch.Tensor | None,
    closeness: Closeness,
    least: float = 0.0,
    rounded: float = 0.0,
) -> float:
    """max|a - b| over the largest change since ``before`` (without ``before``, over the largest element), over what
    rounding of the value and of its computation allows (``rounded``, if more), or over ``least``, whichever is more.
    Integers must be equal."""
    if actual is None or reference is None or actual.shape != reference.shape:
        return math.inf
    if not reference.numel():
        return 0.0
    if not (reference.is_floating_point() or reference.is_complex()):
        return 0.0 if torch.equal(actual.to(reference.dtype), reference) else math.inf
    a, b = actual.to(torch.complex128), reference.to(torch.complex128)
    if torch.equal(torch.view_as_real(a).nan_to_num(), torch.view_as_real(b).nan_to_num()):
        return 0.0
    error = float((a - b).abs().max())
    size = float(b.abs().max())
    changed = max(least, _change(reference, before))
    rounding = max(
        size * (closeness.unit if closeness.always else torch.finfo(reference.dtype).eps),
        closeness.rounding_error(reference, exact),
        rounded,
    )
    divisor = max(changed, APART * rounding / closeness.tolerance)
    return error / divisor if divisor else math.inf


def _moved_by_steps(gradient: float, steps: int, change: float) -> float:
    """By how much rounding may move a parameter in some ``steps``, if it moves its ``gradient`` by so much: of what it
    is to ``change`` by, no larger a share than is excused of gradients."""
    return min(RATE * steps * gradient, MOST_MOVED * change / APART)


def _changes_by_rounding(
    after: torch.Tensor | None, exact: torch.Tensor | None, before: torch.Tensor | None, closeness: Closeness
) -> bool:
    """Whether one process changes a parameter by nothing but rounding: as gradients are that."""
    if after is None or before is None:
        return False
    return _change(after, before) <= MOST_OF_NOISE * closeness.rounding_error(after, exact)


def _change(after: torch.Tensor, before: torch.Tensor | None) -> float:
    """The largest change of an element since ``before``; without it, the largest element."""
    if not after.numel():
        return 0.0
    whole = after.to(torch.complex128)
    return float((whole if before is None else whole - before.to(torch.complex128)).abs().max())
