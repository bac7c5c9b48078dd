"""What a run measured beside what the plan predicts: the JSON lines of :class:`autopar.monitor.Monitor`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath

from autopar.errors import OptionsError
from autopar.ir.plan_record import PlanRecord
from autopar.plans.views.memory_over_step import Levels
from autopar.plans.views.quantities import duration, size

from .memory_picture import thinned
from .step_records import read_records
from .timeline_picture import WIDTH

# Units of the picture. Chosen: two thirds of the picture of memory.
HEIGHT = 120


@dataclass(frozen=True)
class Measured:
    """``rows``: (what, predicted, measured, difference); ``path`` and ``predicted``: the seconds of each step as a
    line, and the height of the prediction; ``about``: a sentence that says what is to be seen."""

    source: str
    rows: tuple[tuple[str, ...], ...]
    width: float
    height: float
    path: str
    predicted: float
    about: str


def read_measured(plan: PlanRecord, path: str | PathLike[str]) -> Measured:
    """What the steps in ``path`` took. The first step of each run is left out: it includes planning and compiling. So
    are steps of other plans, if there are any of this one, as of a run that was restarted on other devices.

    Raises:
        OptionsError: the file cannot be read, a value in it is no figure, or it has no two records of a step.
    """
    records = read_records(path)
    steps, note = _of_plan(plan, [r.figures for r in records if not r.starts and "seconds" in r.figures])
    if not steps:
        raise OptionsError(
            f"{fspath(path)!r} has {len(records)} records of steps: give the steps.jsonl of a run of at least two "
            "steps, which autopar.monitor.Monitor(folder=...) writes"
        )
    seconds = [float(record["seconds"]) for record in steps]
    rows = tuple(_rows(plan, steps, seconds))
    typical, top = statistics.median(seconds), max(*_within(seconds), plan.predicted.step_seconds) * 1.1
    times: Levels = thinned(tuple((float(i), s) for i, s in enumerate(seconds)), float(len(seconds)))

    def y(value: float) -> float:
        return round(max(0.0, HEIGHT * (1 - value / top)), 1)

    line = "".join(
        f"{'L' if i else 'M'}{t / max(1, len(seconds) - 1) * WIDTH:.1f} {y(s)}" for i, (t, s) in enumerate(times)
    )
    about = (
        f"{len(seconds)} step{'s' if len(seconds) > 1 else ''} took {duration(typical)} in the median, "
        f"{duration(min(seconds))} to {duration(max(seconds))}; predicted {duration(plan.predicted.step_seconds)}{note}"
    )
    return Measured(fspath(path), rows, WIDTH, HEIGHT, line, y(plan.predicted.step_seconds), about)


def _of_plan(plan: PlanRecord, steps: list[Mapping[str, float]]) -> tuple[list[Mapping[str, float]], str]:
    """The steps of a run of ``plan``, and what is to be said of others: those that another plan predicted."""
    ours = plan.predicted.step_seconds
    others = [step for step in steps if not math.isclose(step.get("predicted_seconds", ours), ours, rel_tol=1e-6)]
    if not others:
        return steps, ""
    theirs = ", ".join(dict.fromkeys(duration(step["predicted_seconds"]) for step in others))
    if len(others) == len(steps):
        return steps, f". The run is one of another plan, which predicts {theirs}"
    kept = [step for step in steps if step not in others]
    return kept, f". {len(others)} steps of another plan, which predicts {theirs}, are left out"


def _rows(plan: PlanRecord, steps: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> list[tuple[str, ...]]:
    p, typical = plan.predicted, statistics.median(seconds)
    rows: list[tuple[str, ...]] = []
    rows.append(("step, median", duration(p.step_seconds), duration(typical), _difference(typical, p.step_seconds)))
    memory = [int(record["memory_bytes"]) for record in steps if "memory_bytes" in record]
    if memory:
        rows.append(("peak memory", size(p.peak_bytes), size(max(memory)), _difference(max(memory), p.peak_bytes)))
    rates = [record["mfu"] for record in steps if "mfu" in record]
    if rates:
        rate = statistics.median(rates)
        rows.append(("MFU", f"{p.mfu:.1%}", f"{rate:.1%}", _difference(rate, p.mfu)))
    tokens = [record["tokens_per_second"] for record in steps if "tokens_per_second" in record]
    if tokens:
        rows.append(("tokens per second", "", f"{statistics.median(tokens):,.0f}", ""))
    stragglers = [int(record["straggler"]) for record in steps if "straggler" in record]
    if stragglers:
        rank = statistics.mode(stragglers)
        rows.append(("waited for", "", f"rank {rank} in {stragglers.count(rank)} of {len(steps)} steps", ""))
    return rows


def _within(seconds: Sequence[float]) -> Sequence[float]:
    """The seconds that set the scale: nine tenths of the steps, so that one slow step does not flatten all others."""
    return sorted(seconds)[: max(1, round(0.9 * len(seconds)))]


def _difference(measured: float, predicted: float) -> str:
    return f"{measured / predicted - 1:+.0%}" if predicted else ""
