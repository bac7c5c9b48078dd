"""Whether a step under a plan is that of one process: the errors of the loss and of every gradient."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopar.plans.plan import Plan
from autopar.plans.views.page_width import terminal_columns

from .later_steps import Later, compare_later
from .tolerance import Closeness, rounding


@dataclass(frozen=True)
class OneStep:
    """Loss and gradients of one step, as whole float tensors on the CPU."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    seconds: float = 0.0
    plan: Plan | None = None
    unpriced: tuple[str, ...] = ()
    draws: bool = False
    later: Later = field(default_factory=lambda: Later(()))


@dataclass(frozen=True)
class Report:
    """The outcome of :func:`verify`; ``str(report)`` is a table.

    Attributes:
        loss_error, gradient_errors: relative errors, of the loss and by parameter path: max|a - b| / max|b|, where b is
            the value of one process. Under a 16-bit precision policy one process runs under it too, and a difference
            counts against the error of b itself, over a unit of rounding, wherever that is more than max|b|; without
            one, gradients that b itself rounds by more than a quarter of the tolerance are given up to ten times it
            (:mod:`autopar.verification.tolerance`), and named in ``eased`` where they take it.
        noisy: gradients that are zero but for rounding (the bias of keys in attention), which have no relative error:
            those where max|b| is no more than ten times the error of b in float32 (against float64 on one process).
            Their differences count against a million times that error instead.
        seconds: wall-clock time of the whole comparison.
        step_seconds: wall-clock time of one step under the plan, after a first one.
        unpriced: the collectives in which the program that ran and the plan's prices differ. If there are any, the
            plan's predictions are not to be trusted.
        draws: whether the model draws random numbers, so that it was compared with one process under autopar with the
            same seed, not with the model alone.
        unset: gradients that one process leaves at None and the plan has as zeros (an expert in a list that no token
            chose); they count as equal.
        rounding: under a 16-bit policy, the relative distance of one process from float64.
        steps: how many steps were compared.
        later_errors: of everything besides the first loss and its gradients, by what it is (:mod:`.later_steps`):
            buffers after the steps, and of several steps each loss, the parameters and the outputs of an evaluation.
        mesh: the mesh asked for; ``plan.mesh`` may lay the devices out otherwise.
        eased: gradients that differ by more than the tolerance, but not by more than both may be off by rounding.
    """

    plan: Plan
    tolerance: float
    loss: float
    loss_error: float
    gradient_errors: Mapping[str, float]
    noisy: tuple[str, ...]
    seconds: float
    step_seconds: float
    unpriced: tuple[str, ...] = ()
    draws: bool = False
    unset: tuple[str, ...] = ()
    rounding: float | None = None
    eased: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()
    steps: int = 1
    later_errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def max_error(self) -> float:
        return max(self._errors)

    @property
    def _errors(self) -> tuple[float, ...]:
        return self.loss_error, *self.gradient_errors.values(), *self.later_errors.values()

    @property
    def ok(self) -> bool:
        """Whether the loss, every gradient and all that is compared besides are within ``tolerance``; a NaN is not."""
        return all(error <= self.tolerance for error in self._errors)

    @property
    def _how(self) -> str:
        return " under autopar with the same seed (the model draws random numbers)" if self.draws else ""

    def _later_lines(self) -> list[str]:
        """What differs, and otherwise the worst of each kind."""
        worst: dict[str, str] = {}
        ranked = sorted(self.later_errors, key=lambda name: -self.later_errors[name])
        for name in ranked:
            worst.setdefault(name.split(" ")[0], name)
        wrong = [name for name in ranked if not self.later_errors[name] <= self.tolerance]
        shown = wrong[:8] if wrong else worst.values()
        lines = [f"{name:<60} {self.later_errors[name]:10.2e}" for name in shown]
        return lines + ([f"{len(wrong) - 8} more differ"] if len(wrong) > 8 else [])

    @property
    def _where(self) -> str:
        """The mesh asked for, and how the plan lays its devices out if otherwise."""
        stages = f"{self.plan.stages} stages of " if self.plan.stages > 1 else ""
        planned = f"{stages}{self.plan.mesh}"
        return planned if planned == str(self.mesh or self.plan.mesh) else f"{self.mesh}, planned as {planned}"

    def __str__(self) -> str:
        worst = sorted(self.gradient_errors.items(), key=lambda item: -item[1])[:8]
        lines = [
            f"{'equal' if self.ok else 'NOT EQUAL'} to one process{self._how} within {self.tolerance:g}: "
            f"{self.plan.model} on mesh {self._where}",
            f"{'loss':<60} {self.loss_error:10.2e}",
            *(f"{'gradient of ' + name:<60} {error:10.2e}" for name, error in worst),
        ]
        if len(self.gradient_errors) > len(worst):
            lines.append(f"{len(self.gradient_errors) - len(worst)} more gradients, none worse")
        lines += self._later_lines()
        if self.noisy:
            lines.append(f"zero but for rounding, on one process too: {_some(self.noisy)}")
        if self.eased:
            lines.append(f"farther apart, by no more than their rounding on one process: {_some(self.eased)}")
        if self.unset:
            lines.append(f"zeros, where one process leaves None: {_some(self.unset)}")
        if self.rounding is not None:
            lines.append(f"one process under {self.plan.precision} is within {self.rounding:.2g} of float64")
        lines += [f"the program is not what was priced: {line}" for line in self.unpriced]
        lines.append(f"{self.seconds:.1f} s in all, {self.step_seconds * 1e3:.1f} ms a step")
        width = terminal_columns()
        return "\n".join(row for line in lines for row in (textwrap.wrap(line, width) if width else [line]))


def _some(names: tuple[str, ...]) -> str:
    """The first few of them."""
    return f"{', '.join(names[:4])}{', ...' * (len(names) > 4)}"


def judge(
    found: OneStep,
    expected: tuple[OneStep, OneStep | None],
    asked: Closeness,
    seconds: float,
    mesh: tuple[int, ...] = (),
) -> Report:
    """What a step under a plan is, compared with that of one process (see :func:`one_process`)."""
    errors, noisy, unset = _compare(found, *expected, asked)
    alone, exact = expected
    later = compare_later(found.later, alone.later, exact.later if exact else None, asked)
    assert found.plan is not None
    return Report(
        plan=found.plan,
        tolerance=asked.tolerance,
        loss=float(alone.loss),
        loss_error=asked.loss_error(found.loss, alone.loss, exact.loss if exact else None),
        later_errors=later.errors,
        steps=max(1, len(alone.later.losses)),
        gradient_errors=errors,
        noisy=noisy,
        seconds=seconds,
        step_seconds=found.seconds,
        unpriced=found.unpriced,
        draws=found.draws,
        unset=unset,
        rounding=rounding(alone.gradients, exact.gradients) if exact and asked.always else None,
        mesh=mesh,
        eased=tuple(
            name
            for name, error in errors.items()
            if error <= asked.tolerance
            and name not in {*noisy, *unset}
            and asked.is_eased(found.gradients[name], alone.gradients[name])
        ),
    )


def _compare(
    found: OneStep, expected: OneStep, exact: OneStep | None, asked: Closeness
) -> tuple[dict[str, float], tuple[str, ...], tuple[str, ...]]:
    """The error of every gradient, the names of those that are zero but for rounding, and of those that are zeros and
    that one process leaves at None."""
    errors: dict[str, float] = {}
    noisy, unset = [], []
    largest = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)
    for name in sorted({*found.gradients, *expected.gradients}):
        one, other = found.gradients.get(name), expected.gradients.get(name)
        if one is not None and other is None and not one.any():
            errors[name] = 0.0
            unset.append(name)
        elif one is None or other is None or one.shape != other.shape:
            errors[name] = math.inf
        else:
            off = asked.off(other, exact.gradients.get(name) if exact else None)
            errors[name], is_noise = asked.error(one, other, off if off <= asked.most_off * largest else 0.0)
            noisy += [name] if is_noise else []
    return errors, tuple(noisy), tuple(unset)
