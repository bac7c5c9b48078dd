"""What a plan would be under other circumstances: a table of plans, each the answer to one changed question."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from autopar.ir.plan_record import PlanRecord

from .columns import columns
from .page_width import page_width
from .quantities import duration, size
from .stages import mesh_text

Sweep = Literal["memory_limit", "devices", "batch", "precision", "cluster"]
AnyPlan = TypeVar("AnyPlan", bound=PlanRecord, covariant=True)

TITLES: Mapping[Sweep, str] = {
    "memory_limit": "memory limit",
    "devices": "devices",
    "batch": "batch",
    "precision": "precision",
    "cluster": "cluster",
}
# The sweeps whose values are amounts, which a picture can be drawn over, with what is counted.
MEASURED: Mapping[Sweep, str] = {
    "memory_limit": "memory limit of a device",
    "devices": "devices",
    "batch": "samples of a batch",
}
HEAD = ("", "mesh", "step", "against this", "samples/s", "peak memory", "of", "MFU", "")
# Which columns of a table are figures.
FIGURES = (2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Answer(Generic[AnyPlan]):
    """The plan for one changed question. ``sweep`` is what was changed and ``value`` to what: bytes per device, a
    number of devices or the shape of a mesh, samples of the global batch, a precision, or a cluster's name.
    ``amount``: the value as a number (bytes, devices, samples; 0 for precisions and clusters). ``plan`` is None where
    there is no plan; then ``error`` says why, in full, and ``needed_bytes`` what was found to be enough memory, if that
    was. ``written``: the value as text if it was asked as such."""

    sweep: Sweep
    value: Any
    amount: int
    plan: AnyPlan | None
    error: str = ""
    written: str = ""
    needed_bytes: int | None = None

    @property
    def label(self) -> str:
        """The changed value for people."""
        if self.written:
            return self.written
        if self.sweep == "memory_limit":
            return size(self.amount)
        if isinstance(self.value, tuple):
            return "x".join(map(str, self.value))
        return str(self.value)

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of a step; None where there is no plan."""
        return None if self.plan is None else step_seconds(self.plan)


@dataclass(frozen=True)
class WhatIf(Generic[AnyPlan]):
    """The result of :meth:`autopar.plans.plan.Plan.whatif`: ``answers``, sweep by sweep in the order of their amounts;
    ``str`` is a table. ``plan``: the plan that was asked."""

    plan: AnyPlan
    answers: tuple[Answer[AnyPlan], ...]

    def of(self, sweep: Sweep) -> tuple[Answer[AnyPlan], ...]:
        """The answers of one sweep."""
        return tuple(answer for answer in self.answers if answer.sweep == sweep)

    @property
    def sweeps(self) -> tuple[Sweep, ...]:
        """What was changed."""
        return tuple(dict.fromkeys(answer.sweep for answer in self.answers))

    def frontier(self, sweep: Sweep) -> tuple[Answer[AnyPlan], ...]:
        """The answers that are quicker than every one with a smaller amount: of memory, of devices. A plan that fits
        into less memory also fits into more, so these are what is to be chosen from."""
        best: list[Answer[AnyPlan]] = []
        for answer in sorted(self.of(sweep), key=lambda answer: (answer.amount, answer.seconds or 0.0)):
            if answer.seconds is not None and (not best or answer.seconds < (best[-1].seconds or 0.0)):
                best.append(answer)
        return tuple(best)

    def rows(self, sweep: Sweep) -> list[tuple[str, ...]]:
        """The cells of the table of one sweep, under :data:`HEAD`."""
        return [_cells(self.plan, answer) for answer in self.of(sweep)]

    def data(self) -> dict[str, Any]:
        """Everything as plain numbers: seconds and bytes. An answer without a plan has its ``error`` instead."""
        return {
            "step_seconds": step_seconds(self.plan),
            "peak_bytes": self.plan.predicted.peak_bytes,
            "answers": [_plain(answer) for answer in self.answers],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        predicted = self.plan.predicted
        yield f"What if  {self.plan.model}"
        yield (
            f"this plan: step {duration(step_seconds(self.plan))}, peak {size(predicted.peak_bytes)} of "
            f"{size(self.plan.memory_limit)}, {mesh_text(self.plan)}"
        )
        for sweep in self.sweeps:
            yield ""
            head = (TITLES[sweep], *HEAD[1:])
            yield from (f"  {line}" for line in columns(head, self.rows(sweep), right=FIGURES))
            for answer in self.of(sweep):
                yield from _reason(answer)


def _reason(answer: Answer[PlanRecord]) -> Iterator[str]:
    """Why an answer is no plan."""
    if answer.plan is None:
        yield from textwrap.wrap(
            f"{answer.label}: {answer.error}", page_width(), initial_indent="  ", subsequent_indent="    "
        )


def _cells(asked: PlanRecord, answer: Answer[PlanRecord]) -> tuple[str, ...]:
    plan = answer.plan
    if plan is None:
        return (answer.label, "", *[""] * len(FIGURES), "no plan")
    predicted = plan.predicted
    seconds, before = step_seconds(plan), step_seconds(asked)
    return (
        answer.label,
        _shape(plan),
        duration(seconds),
        f"{seconds / before - 1:+.1%}" if before else "",
        f"{samples(plan) / seconds:,.3g}" if seconds else "",
        size(predicted.peak_bytes),
        size(plan.memory_limit),
        f"{predicted.mfu:.1%}",
        _remark(plan),
    )


def step_seconds(plan: PlanRecord) -> float:
    """Seconds of a step, with a step's share of what replicas exchange after it."""
    exchanging = 0.0 if plan.sync is None or plan.sync.hidden else plan.sync.seconds_per_step
    return plan.predicted.step_seconds + exchanging


def samples(plan: PlanRecord) -> int:
    """The samples of a global batch: each replica has a plan's."""
    return plan.batch * (1 if plan.sync is None else plan.sync.replicas)


def _shape(plan: PlanRecord) -> str:
    if not plan.stage_meshes.are_equal:
        return f"stages of {' + '.join(map(str, plan.stage_meshes.sizes))} devices"
    stages = f"{plan.stages} stages x " if plan.stages > 1 else ""
    axes = [f"{name}={count}" for name, count in zip(plan.axis_names, plan.mesh, strict=True) if count > 1]
    return stages + (" x ".join(axes) or "1 device")


def _remark(plan: PlanRecord) -> str:
    """How good the plan is, and what it does to fit."""
    proven = plan.status if plan.status != "feasible" else f"gap {plan.gap:.1%}"
    words = [f"placements {proven}" if plan.stages > 1 else proven]
    if plan.microbatches > 1:
        words.append(f"{plan.microbatches} microbatches")
    if plan.recomputed:
        words.append("recomputes")
    if any(place.offload for place in plan.parameters.values()):
        words.append("offloads")
    return ", ".join(words)


def _plain(answer: Answer[PlanRecord]) -> dict[str, Any]:
    found: dict[str, Any] = {"sweep": answer.sweep, "value": answer.value, "amount": answer.amount}
    if answer.plan is None:
        return found | {"error": answer.error}
    plan = answer.plan
    return found | {
        "mesh": list(plan.mesh),
        "stages": plan.stages,
        "microbatches": plan.microbatches,
        "step_seconds": step_seconds(plan),
        "peak_bytes": plan.predicted.peak_bytes,
        "memory_limit": plan.memory_limit,
        "status": plan.status,
        "gap": plan.gap,
    }


def in_order(answers: Sequence[Answer[AnyPlan]]) -> tuple[Answer[AnyPlan], ...]:
    """Answers of amounts by amount, others as they were asked."""
    return tuple(sorted(answers, key=lambda answer: answer.amount))
