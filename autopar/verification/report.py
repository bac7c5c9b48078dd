"""Whether a step under a plan equals that of one process: the errors of the loss and of every gradient."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from autopar.plans.plan import Plan
from autopar.plans.views.idle_axes import divides_nothing
from autopar.plans.views.page_width import terminal_columns

from .gradients import Comparison, Noise, compare
from .later_steps import LaterErrors, LaterSteps, compare_later
from .pieces import Pieces
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
    later: LaterSteps = field(default_factory=lambda: LaterSteps(()))
    pieces: Pieces | None = None


@dataclass(frozen=True)
class Report:
    """The outcome of :func:`verify`; ``str(report)`` is a table.

    Attributes:
        loss_error, gradient_errors: relative errors, of the loss and by parameter path: max|a - b| / max|b|, where b is
            the value of one process. Under a 16-bit precision policy one process runs under it too, and a difference
            counts against the error of b itself, over a unit of rounding, wherever that is more than max|b|. Without
            one, gradients where rounding changes b itself by more than a quarter of the tolerance may differ by up to
            ten tolerances (:mod:`autopar.verification.tolerance`), or by four times what rounding moves them by, if
            that was measured (as for ``noise``); those that do are named in ``eased``.
        noise: gradients that are zero but for rounding (the bias of keys in attention), which have no relative error:
            those where max|b| is at most ten times the error of b in float32 (against float64 on one process; under a
            16-bit policy those that are at most the error of b in float64). Their differences count against that error
            instead, of which they may be ten times (four or eight). Where they are more and the difference is within
            the tolerance of the largest gradient, the plan is run again with parameters and inputs that differ by a
            unit of rounding, and what that moves counts if it is more: it moves rounding, not the errors of a plan. The
            same is done where gradients and buffers that are more than noise differ by up to forty times the error of
            b in float32.
        seconds: wall-clock time of the whole comparison.
        step_seconds: wall-clock time of one step under the plan, after a first one.
        unpriced: the collectives in which the program that ran and the plan's prices differ. If there are any, do not
            trust the plan's predictions.
        draws: whether the model draws random numbers, so that it was compared with one process under autopar with the
            same seed, not with the model alone.
        unset: gradients that are None on one process and zeros under the plan (an expert in a list that no token
            chose); they count as equal.
        rounding: under a 16-bit policy, the relative distance of one process from float64, ``noise`` left out.
        steps: how many steps were compared.
        later_errors: errors of everything besides the first loss and its gradients, by name (:mod:`.later_steps`):
            buffers after the steps, and for several steps each loss, the parameters and the outputs of an evaluation.
            Buffers may differ by four times their rounding (the mean of what a norm has centred is nothing else), which
            is measured as for ``noise`` where they differ by more.
        mesh: the mesh asked for; ``plan.mesh`` may arrange the devices differently.
        eased: gradients that differ by more than the tolerance, but by no more than rounding explains on both sides.
        unmeasured: why the plan could not be run again to measure what rounding does to gradients and buffers that were
            in doubt, which then fail; empty if it could, or none was.
    """

    plan: Plan
    tolerance: float
    loss: float
    loss_error: float
    gradient_errors: Mapping[str, float]
    noise: Mapping[str, Noise]
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
    unmeasured: str = ""

    @property
    def max_error(self) -> float:
        return max(self._errors)

    @property
    def _errors(self) -> tuple[float, ...]:
        return self.loss_error, *self.gradient_errors.values(), *self.later_errors.values()

    @property
    def ok(self) -> bool:
        """Whether the loss, every gradient and everything else compared are within ``tolerance``; a NaN is not."""
        return all(error <= self.tolerance for error in self._errors)

    @property
    def _how(self) -> str:
        return " under autopar with the same seed (the model draws random numbers)" if self.draws else ""

    def _later_lines(self) -> list[str]:
        """What differs; if nothing does, the worst of each kind."""
        worst: dict[str, str] = {}
        ranked = sorted(self.later_errors, key=lambda name: -self.later_errors[name])
        for name in ranked:
            worst.setdefault(name.split(" ")[0], name)
        wrong = [name for name in ranked if not self.later_errors[name] <= self.tolerance]
        shown = wrong[:8] if wrong else worst.values()
        lines = [f"{name:<60} {self.later_errors[name]:10.2e}" for name in shown]
        return lines + ([f"{len(wrong) - 8} more differ"] if len(wrong) > 8 else [])

    def _noise_lines(self) -> list[str]:
        """What is nothing but rounding on one process and under the plan, and on one process alone."""
        right = [name for name in self.noise if self.gradient_errors[name] <= self.tolerance]
        wrong = [name for name in self.noise if name not in right]
        both = "zero but for rounding (largest elements on one process and under the plan):"
        alone = "zero but for rounding on one process, too far from that under the plan (largest elements of both):"
        lines: list[str] = []
        for heading, names in ((alone, wrong), (both, right)):
            names.sort(key=lambda name: (self.noise[name].moved is None, -self.noise[name].planned))
            lines += [heading] if names else []
            lines += [f"{'  ' + name:<51} {self.noise[name]}" for name in names[:4]]
            lines += [f"  {len(names) - 4} more"] if len(names) > 4 else []
        return lines

    @property
    def noisy(self) -> tuple[str, ...]:
        """The names in ``noise``."""
        return tuple(self.noise)

    @property
    def _where(self) -> str:
        """The mesh asked for, and the plan's if it arranges the devices differently."""
        stages = f"{self.plan.stages} stages of " if self.plan.stages > 1 else ""
        meshes = self.plan.stage_meshes
        planned = f"{stages}{meshes if not meshes.are_equal else self.plan.mesh}"
        return planned if planned == str(self.mesh or self.plan.mesh) else f"{self.mesh}, planned as {planned}"

    @property
    def divides_nothing(self) -> bool:
        """Whether every one of several processes computes the whole step, so that little was proven."""
        return divides_nothing(self.plan)

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
        lines += self._noise_lines()
        if self.unmeasured:
            lines.append(f"what rounding does under the plan was not measured: {self.unmeasured}")
        if self.eased:
            lines.append(f"farther apart, by no more than their rounding: {_some(self.eased)}")
        if self.unset:
            lines.append(f"zeros, where one process leaves None: {_some(self.unset)}")
        if self.rounding is not None:
            lines.append(f"one process under {self.plan.precision} is within {self.rounding:.2g} of float64")
        lines += [f"the program is not what was priced: {line}" for line in self.unpriced]
        if self.divides_nothing:
            lines.append(
                "nothing is divided: each process computes the whole step, which is quickest by these prices; "
                "Options(zero=3), a layout or pins divide it"
            )
        lines.append(f"{self.seconds:.1f} s in all, {self.step_seconds * 1e3:.1f} ms a step")
        width = terminal_columns()
        return "\n".join(row for line in lines for row in (textwrap.wrap(line, width) if width else [line]))


def _some(names: tuple[str, ...]) -> str:
    """The first few of ``names``, as text."""
    return f"{', '.join(names[:4])}{', ...' * (len(names) > 4)}"


@dataclass(frozen=True)
class Compared:
    """A step under a plan beside one on one process: its gradients, and all that comes later."""

    gradients: Comparison
    later: LaterErrors

    @property
    def doubtful(self) -> tuple[str, ...]:
        """The gradients and buffers that differ by what rounding may do."""
        return (*self.gradients.doubtful, *self.later.doubtful)


def compared(
    actual: OneStep,
    expected: tuple[OneStep, OneStep | None],
    closeness: Closeness,
    moved: Mapping[str, float] | None = None,
) -> Compared:
    """A step under a plan beside the ``expected`` one. ``moved``: how far rounding alone moves gradients and buffers
    under the plan, where it was measured."""
    reference, exact = expected
    found = compare(actual.gradients, reference.gradients, exact.gradients if exact else None, closeness, moved)
    noisy = {name for name in found.noise if found.errors[name] <= closeness.tolerance}
    later = compare_later(actual.later, reference.later, exact.later if exact else None, closeness, noisy, moved)
    return Compared(found, later)


def judge(
    actual: OneStep,
    expected: tuple[OneStep, OneStep | None],
    closeness: Closeness,
    seconds: float,
    mesh: tuple[int, ...] = (),
    known: Compared | None = None,
) -> Report:
    """Compares a step under a plan with the ``expected`` one of one process (see :func:`one_process`), unless that is
    ``known`` (see :func:`compared`)."""
    reference, exact = expected
    known = known or compared(actual, expected, closeness)
    found, later = known.gradients, known.later
    assert actual.plan is not None
    return Report(
        plan=actual.plan,
        tolerance=closeness.tolerance,
        loss=float(reference.loss),
        loss_error=closeness.loss_error(actual.loss, reference.loss, exact.loss if exact else None),
        later_errors=later.errors,
        steps=max(1, len(reference.later.losses)),
        gradient_errors=found.errors,
        noise=found.noise,
        seconds=seconds,
        step_seconds=actual.seconds,
        unpriced=actual.unpriced,
        draws=actual.draws,
        unset=found.unset,
        rounding=_rounding(reference, exact, found.noise) if exact and closeness.always else None,
        mesh=mesh,
        eased=tuple(
            name
            for name, error in found.errors.items()
            if error <= closeness.tolerance
            and name not in {*found.noise, *found.unset}
            and closeness.is_eased(actual.gradients[name], reference.gradients[name])
        ),
    )


def _rounding(reference: OneStep, exact: OneStep, noise: Collection[str]) -> float:
    """How far one process is from float64, in the gradients that are more than rounding."""
    return rounding({n: g for n, g in reference.gradients.items() if n not in noise}, exact.gradients)
