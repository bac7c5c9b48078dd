"""Step time against memory, devices or batch, as shapes: what :meth:`autopar.plans.plan.Plan.whatif` found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.plan_record import PlanRecord
from autopar.plans.views.quantities import duration, size
from autopar.plans.views.what_if import FIGURES, HEAD, MEASURED, TITLES, Answer, Sweep, WhatIf

# Units of the picture. Chosen: two of them fit beside each other on a desktop.
WIDTH, HEIGHT = 520, 200
# Space at the sides, in which a point's label fits.
_MARGIN = 40
# Space above the slowest point and below the quickest, as a factor. Chosen: a point and its label.
_ROOM = 1.15
# Height of a line of text, and about the width of a letter (page.css).
_LINE, _LETTER = 14, 7


@dataclass(frozen=True)
class Point:
    """An answer: ``css`` is "best" on the frontier, "other" off it, and "none" where there is no plan. ``label``: what
    is written below it; empty if there is no room."""

    x: float
    y: float
    css: str
    label: str
    title: str


@dataclass(frozen=True)
class FrontierPicture:
    """``line``: the least seconds for each amount, as stairs; ``ideal``: seconds if they fell as devices grow; "" if
    that is not asked. ``levels``: heights with their seconds; ``axis``: what is counted from left to right.
    ``about``: a sentence that says what is to be seen."""

    width: float
    height: float
    points: tuple[Point, ...]
    line: str
    ideal: str
    levels: tuple[tuple[float, str], ...]
    axis: str
    about: str


@dataclass(frozen=True)
class FrontierSection:
    """One sweep on the page: the picture, if its values are amounts, and the table. ``reasons``: values without a
    plan, each with why."""

    title: str
    picture: FrontierPicture | None
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: tuple[int, ...]
    reasons: tuple[tuple[str, str], ...]


def frontier_sections(found: WhatIf[PlanRecord]) -> Iterator[FrontierSection]:
    """What the page shows of ``found``, sweep by sweep."""
    for sweep in found.sweeps:
        answers = found.of(sweep)
        yield FrontierSection(
            TITLES[sweep],
            frontier_picture(found, sweep) if sweep in MEASURED else None,
            (TITLES[sweep], *HEAD[1:]),
            tuple(found.rows(sweep)),
            FIGURES,
            tuple((answer.label, answer.error) for answer in answers if answer.plan is None),
        )


def frontier_picture(found: WhatIf[PlanRecord], sweep: Sweep) -> FrontierPicture | None:
    """The picture of one sweep, both axes logarithmic; None if fewer than two of its answers are plans."""
    answers = found.of(sweep)
    solved = [answer for answer in answers if answer.seconds]
    if len(solved) < 2:
        return None
    x = _scale([answer.amount for answer in answers], 2 * _MARGIN, WIDTH - _MARGIN)
    seconds = [answer.seconds or 0.0 for answer in solved]
    perfect = seconds[0] * solved[0].amount / solved[-1].amount if sweep == "devices" else min(seconds)
    y = _scale([max(seconds) * _ROOM, min(*seconds, perfect) / _ROOM], 20, HEIGHT)
    best = found.frontier(sweep)
    points = tuple(_point(answer, x, y, any(answer is other for other in best)) for answer in answers)
    first, last = solved[0], solved[-1]
    ideal = f"M{x(first.amount)} {y(seconds[0])}L{x(last.amount)} {y(perfect)}" if sweep == "devices" else ""
    line = _line(best, x, y) if sweep != "batch" else ""
    about = _about(sweep, answers, solved)
    return FrontierPicture(
        WIDTH, HEIGHT, _labelled(points), line, ideal, _levels(seconds, y), f"{MEASURED[sweep]} \u2192", about
    )


def _levels(seconds: Sequence[float], y: Callable[[float], float]) -> tuple[tuple[float, str], ...]:
    """The slowest and the quickest, and of the seconds between them those that have room: with their heights."""
    most, least = max(seconds), min(seconds)
    found = [most] if most == least or y(least) - y(most) < _LINE else [most, least]
    for value in sorted(seconds):
        if all(abs(y(value) - y(other)) >= 2 * _LINE for other in found):
            found.append(value)
    return tuple((y(value), duration(value)) for value in sorted(found, reverse=True))


def _labelled(points: Sequence[Point]) -> tuple[Point, ...]:
    """``points`` with the labels for which there is room: those of the frontier first, then from left to right."""
    order = sorted(range(len(points)), key=lambda i: (points[i].css != "best", points[i].x))
    shown: list[int] = []
    for i in order:
        widths = [(len(points[i].label) + len(points[j].label)) / 2 * _LETTER for j in shown]
        if all(abs(points[i].x - points[j].x) > width + _LETTER for j, width in zip(shown, widths, strict=True)):
            shown.append(i)
    return tuple(point if i in shown else replace(point, label="") for i, point in enumerate(points))


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """A logarithmic scale that maps the first of ``values`` to ``start`` and the last to ``end``."""
    first, span = math.log(values[0]), math.log(values[-1]) - math.log(values[0])

    def place(value: float) -> float:
        part = (math.log(value) - first) / span if span else 0.5
        return round(start + (end - start) * part, 1)

    return place


def _point(
    answer: Answer[PlanRecord], x: Callable[[float], float], y: Callable[[float], float], is_best: bool
) -> Point:
    if answer.plan is None or not answer.seconds:
        return Point(x(answer.amount), HEIGHT, "none", answer.label, f"{answer.label}: no plan")
    title = f"{answer.label}: {duration(answer.seconds)}, peak {size(answer.plan.predicted.peak_bytes)}"
    return Point(x(answer.amount), y(answer.seconds), "best" if is_best else "other", answer.label, title)


def _line(best: Sequence[Answer[PlanRecord]], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """What can be had for each amount: the best of all that take less stays possible until a better one begins."""
    start = f"M{x(best[0].amount)} {y(best[0].seconds or 0)}"
    return start + "".join(f"H{x(answer.amount)}V{y(answer.seconds or 0)}" for answer in best[1:]) + f"H{WIDTH}"


def _about(sweep: Sweep, answers: Sequence[Answer[PlanRecord]], solved: Sequence[Answer[PlanRecord]]) -> str:
    text = f"Step time against {TITLES[sweep]}: " + ", ".join(
        f"{duration(answer.seconds or 0.0)} at {answer.label}" for answer in solved
    )
    none = [answer.label for answer in answers if answer.plan is None]
    return text + (f"; no plan at {', '.join(none)}" if none else "")
