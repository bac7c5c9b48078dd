"""The report of :func:`autopar.plan_layouts`: a table of plans for so many devices, what training takes with each, and
where the prices come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.plans.plan import Plan
from autopar.plans.views.columns import columns
from autopar.plans.views.coverage import coverage
from autopar.plans.views.idle_axes import legend
from autopar.plans.views.quantities import amount, duration, size
from autopar.plans.views.stages import mesh_text
from autopar.plans.views.summary import memory_parts
from autopar.search.candidate import RULE

from .figures import bubble_of
from .priced import Priced, Row

# How many other plans of the search a report shows.
# Chosen: what fits on a page next to the layouts compared with.
SHOWN = 6
# By definition.
SECONDS_OF_A_DAY = 86400.0


@dataclass(frozen=True)
class LayoutReport:
    """The best plan for ``devices`` devices, beside others.

    Attributes:
        plan: the plan, as any.
        named: the layouts given for comparison.
        checkpoint_bytes: bytes of the weights, and of the optimizer's state of trained ones.
        tokens, sample_tokens: those of the whole training, and of a sample.
        device_flops: FLOP/s of a device at an MFU of 1.
        notes: what was assumed of the hardware, and the plan's warnings.
        seconds, cpu_seconds: what the plan took, tracing included.
    """

    plan: Plan
    model: str
    parameters: int
    checkpoint_bytes: int
    devices: int
    sample_tokens: int | None
    tokens: float | None
    named: Mapping[str, Priced]
    device_flops: float
    notes: tuple[str, ...]
    seconds: float
    cpu_seconds: float

    @property
    def found(self) -> tuple[Row, ...]:
        """The plan, then the others that the search priced, the quickest first."""
        plan, limit = self.plan, self.plan.least_limit
        others = [
            Row(name, priced, limit)
            for name, priced in plan.baselines.items()
            if priced is not None and not name.startswith(RULE)
        ]
        others.sort(key=lambda row: row.predicted.step_seconds)
        return Row(described(plan), plan.predicted, plan.memory_limit, self.notes), *others

    @property
    def compared(self) -> dict[str, Row]:
        """What the plan is compared with, by name: the layouts given, and what a rule of thumb chooses ("tensor ranks
        within a node, fewest stages that fit, the rest data ranks"), if the search priced it beside the plan."""
        rows = {name: priced.row for name, priced in self.named.items()}
        for name, priced in self.plan.baselines.items():
            kind, _, text = name.partition(": ")
            if kind == RULE and priced is not None:
                rows["rule"] = Row(text, priced, self.plan.least_limit)
        return rows

    def days(self, plan: Plan | Priced | Row) -> float | None:
        """Days of training for ``tokens`` under a plan, a priced layout or a row; None if the number of tokens is
        unknown."""
        if self.tokens is None or self.sample_tokens is None:
            return None
        steps = self.tokens / (self.plan.batch * self.sample_tokens)
        return steps * plan.predicted.step_seconds / SECONDS_OF_A_DAY

    def data(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        searched = self.plan.searched
        return {
            "model": self.model,
            "parameters": self.parameters,
            "devices": self.devices,
            "cluster": self.plan.cluster,
            "source": self.plan.cluster_source,
            "batch": self.plan.batch,
            "planning_seconds": self.seconds,
            "planning_cpu_seconds": self.cpu_seconds,
            "placement_gap": self.plan.gap,
            "searched": None if searched is None else asdict(searched),
            "excluded": dict(self.plan.excluded),
            "tokens": self.tokens,
            "checkpoint_bytes": self.checkpoint_bytes,
            "layouts": [self._figures(row) for row in self.found],
            **{name: self._figures(row) for name, row in self.compared.items()},
        }

    def _figures(self, row: Row) -> dict[str, Any]:
        return {
            "layout": row.described,
            **row.predicted.to_dict(),
            "tflops_per_device": row.predicted.mfu * self.device_flops / 1e12,
            "days": self.days(row),
            "memory_limit": row.memory_limit,
            "fits": row.fits,
            "notes": list(row.notes),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        plan = self.plan
        yield (
            f"{self.model}: {amount(self.parameters)} parameters on {self.devices} devices of {plan.cluster}, "
            f"batches of {plan.batch}"
        )
        yield f"planned in {duration(self.seconds)} ({duration(self.cpu_seconds)} of computing)"
        if plan.searched is not None:
            yield coverage(plan.searched, plan.predicted.step_seconds)
        yield ""
        rows = {**{str(i): row for i, row in enumerate(self.found[: SHOWN + 1], 1)}, **self.compared}
        yield from self._table(rows)
        yield from (f"{kind}: {why}" for kind, why in plan.excluded.items())
        yield ""
        held = f"{size(plan.predicted.peak_bytes)} of {size(plan.memory_limit)}"
        yield f"memory of the fullest device: {held} ({', '.join(memory_parts(plan))})"
        yield f"checkpoint: {size(self.checkpoint_bytes)} (weights and the state of {plan.optimizer})"
        yield f"prices: {plan.cluster_source}"
        yield "print(report.plan) shows the first, which is the plan"

    def _table(self, rows: Mapping[str, Row]) -> Iterator[str]:
        table = columns(_HEAD, [self._row(name, row) for name, row in rows.items()], right=range(1, len(_HEAD)))
        # Descriptions are the last column, so that they may have any length.
        for line, text in zip(table, ["plan", *(row.described for row in rows.values())], strict=True):
            yield f"{line}  {text}"
        bound = {name: "up to " * (row.needed_bytes is None) + size(row.excess_bytes) for name, row in rows.items()}
        too_big = [f"{name} by {bound[name]}" for name, row in rows.items() if not row.fits]
        if too_big:
            yield f"! does not fit: {', '.join(too_big)}"
        if len(self.found) > SHOWN + 1:
            yield f"{len(self.found) - SHOWN - 1} more in report.found"
        yield from filter(None, [legend(row.described for row in rows.values())])
        notes = dict.fromkeys(note for row in rows.values() for note in row.notes)
        yield from (f"! {' '.join(note.split())}" for note in notes)

    def _row(self, name: str, row: Row) -> list[str]:
        predicted, days = row.predicted, self.days(row)
        return [
            name,
            duration(predicted.step_seconds),
            _short(predicted.mfu * self.device_flops / 1e12),
            f"{predicted.mfu:.1%}",
            "-" if days is None else _short(days),
            duration(predicted.comm_seconds),
            duration(bubble_of(predicted)),
            size(predicted.peak_bytes) + (" " if row.fits else "!"),
        ]


_HEAD = ("", "step", "TFLOP/s", "MFU", "days", "comm", "bubble", "memory ")


def described(plan: Plan) -> str:
    """A plan in a line: its axes, its schedule and its microbatches."""
    parts = [f"({mesh_text(plan)})"]
    parts += [plan.schedule or ""] if plan.stages > 1 else ["no stages"]
    parts += [f"{plan.microbatches} microbatches"] if plan.microbatches > 1 else []
    parts += [f"{len(plan.recomputed)} operations recomputed"] if plan.recomputed else []
    return ", ".join(parts)


def _short(number: float) -> str:
    """Rounded to an integer from a hundred on, else to two or three digits, however small."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}" if number >= 1 else f"{number:.2g}"
