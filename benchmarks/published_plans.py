"""Plans beside published measurements: ``python -m benchmarks.published_plans [FILE...] [--most N] [--json]``.

Of each file the rows that give their layout in full are planned under that layout (:func:`autopar.price`): what a step
of *autopar* would take, by the prices of the plan that would run. Nothing of another system's recipe is in it, so where
a system does something that autopar does not (products in fp8, modules that run operation by operation, messages that
block), plans differ from it by as much; ``benchmarks.published`` emulates these systems. A plan of a row takes about as
long as any plan, so ``--most`` rows of each file are taken, evenly spread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.given_fields import own_fields
from autopar.layout import Layout

from .published_models import build
from .published_rows import PublishedCase, case_of, read_rows
from .published_shape import NotExpressible
from .report import describe_machine, emit, make_table

ROWS = Path(__file__).parent / "published"


@dataclass(frozen=True)
class PlannedRow:
    """A row's published seconds, and those of the plan under its layout. ``fits``: whether the plan is within the
    device's memory; the row did fit."""

    file: str
    row: str
    layout: str
    published: float
    predicted: float
    fits: bool

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def plain_layout(case: PublishedCase) -> Layout | None:
    """The layout of a row, without the recipe of its system; None where no plan has it."""
    known = {one.name: getattr(case.layout, one.name) for one in own_fields(Layout)}
    if known["recompute"] == "elementwise":
        known["recompute"] = "selective"  # Plans recompute inside of kernels what is elementwise, as they do unasked.
    has_plan = all(known[name] in choices for name, choices in Layout.choices.items())
    return Layout(**known) if case.space is None and has_plan else None


def cases_of(path: Path) -> Iterator[tuple[str, PublishedCase, Layout]]:
    """The timed rows of a file whose layout a plan can have."""
    for at, row in enumerate(read_rows(path), 1):
        if isinstance(row, NotExpressible):
            continue
        try:
            case = case_of(row)
        except NotExpressible:
            continue
        layout = plain_layout(case)
        if case.seconds is not None and layout is not None:
            yield str(row.get("row") or row.get("id") or f"row {at}"), case, layout


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of ``items``, evenly spread, the first and the last among them.

    >>> spread("abcdefg", 3)
    ['a', 'd', 'g']
    """
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / max(1, most - 1))] for at in range(most)]


def planned(file: str, name: str, case: PublishedCase, layout: Layout) -> PlannedRow:
    """A row, planned. Raises :class:`AutoparError` where there is no plan."""
    ids = torch.empty(case.batch, case.shape.seq, dtype=torch.long, device="meta")
    found = autopar.price(build(case.shape, torch.float32), (ids, ids), case.cluster, layout=layout)
    return PlannedRow(file, name, str(layout), case.seconds or math.nan, found.predicted.step_seconds, found.fits)


def planned_rows(files: Sequence[Path], most: int) -> tuple[list[PlannedRow], dict[str, str]]:
    """The rows of some files, planned, and why others could not be."""
    rows, failed = list[PlannedRow](), dict[str, str]()
    for path in files:
        for name, case, layout in spread(list(cases_of(path)), most):
            try:
                rows.append(planned(path.stem, name, case, layout))
            except AutoparError as error:
                failed[f"{path.stem}: {name}"] = str(error)
                continue
            row = rows[-1]
            print(f"{row.file[:20]:20} {row.row[:44]:44} {row.predicted:9.3f} s {row.error:+7.1%}", file=sys.stderr)
    return rows, failed


def summary(rows: Sequence[PlannedRow]) -> dict[str, float]:
    """Shares: mean and median absolute error, mean error (negative: priced too quick), and how many fit."""
    errors = [row.error for row in rows]
    return {
        "rows": len(rows),
        "mean_absolute_error": statistics.fmean(map(abs, errors)),
        "median_absolute_error": statistics.median(map(abs, errors)),
        "mean_error": statistics.fmean(errors),
        "fits": statistics.fmean(row.fits for row in rows),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(ROWS.glob("*.jsonl")))
    parser.add_argument("--most", type=int, default=6, help="rows of a file that are planned")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    given = parser.parse_args(arguments)
    rows, failed = planned_rows(given.files, given.most)
    by_file = {name: [row for row in rows if row.file == name] for name in dict.fromkeys(row.file for row in rows)}
    summaries = {name: summary(those) for name, those in by_file.items()}
    summaries |= {"overall": summary(rows)} if rows else {}
    cells = [
        (name, f"{one['rows']:.0f}", *(f"{one[key]:+.1%}" for key in one if key != "rows"))
        for name, one in summaries.items()
    ]
    head = ("file", "rows", "mean |error|", "median |error|", "mean error", "fit")
    table = make_table("plans beside published steps", head, cells, f"{len(failed)} rows could not be planned")
    found = {"machine": describe_machine(), "summary": summaries, "rows": [asdict(row) for row in rows]}
    emit({**found, "failed": failed}, table, given.json, given.output)


if __name__ == "__main__":
    main()
