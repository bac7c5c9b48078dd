"""Prices against published measurements: ``python -m benchmarks.published FILE.jsonl... [--json]``.

Each row of a file is one measured training step (or one that did not fit): its model is built from its fields, its
layout priced on its cluster, and predicted and published seconds printed side by side; then, per file and overall, the
mean absolute error, Kendall's tau within each sweep (one model, batch and cluster under several layouts), how much
slower the layout that is best by our prices was measured than the best, and how often "fits" was right. What a row
leaves open of its layout is chosen by our search within what its method allows (:mod:`.published_open`); such rows say
which fields were chosen, and have figures of their own. Rows that cannot be expressed are skipped with a reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import Priced
from benchmarks.emulator.pricing import pricing_of

from .published_models import build
from .published_open import choose
from .published_rows import PublishedCase, case_of, read_rows
from .published_scores import Scored, left_out, summary
from .published_shape import NotExpressible, Shape


class Models:
    """Models traced once for each shape and dtype: not every device multiplies in each, or as quickly."""

    def __init__(self) -> None:
        self.known: dict[tuple[Shape, torch.dtype], LayoutModel] = {}

    def of(self, case: PublishedCase) -> LayoutModel:
        shape = case.shape
        dtype = pricing_of(case.layout).dtype(case.layout)
        if (shape, dtype) not in self.known:
            ids = torch.empty(2, shape.seq, dtype=torch.long, device="meta")
            self.known[shape, dtype] = LayoutModel.of(build(shape, dtype), (ids, ids))
        return self.known[shape, dtype]


@dataclass(frozen=True)
class Skipped:
    row: str
    reason: str


def price_row(case: PublishedCase, models: Models) -> tuple[Priced, tuple[str, ...]]:
    """The price of a row's layout, and which of its fields were chosen."""
    model, cluster, batch = models.of(case), case.cluster, case.batch
    if case.space is None:
        return model.price(case.layout, cluster, batch), ()
    return choose(model, cluster, case.devices, batch, case.layout, case.space)


def score_file(path: Path, models: Models) -> tuple[list[Scored], list[Skipped]]:
    scored: list[Scored] = []
    skipped: list[Skipped] = []
    try:
        rows = list(read_rows(path))
    except OSError as error:
        return [], [Skipped(str(path), f"cannot be read: {error.strerror}")]
    if not rows:
        return [], [Skipped(str(path), "the file has no rows")]
    for at, row in enumerate(rows, 1):
        name = f"row {at}" if isinstance(row, NotExpressible) else str(row.get("id") or row.get("row") or f"row {at}")
        found = _scored(name, path.stem, row, models)
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            scored.append(found)
            print(found.line(), file=sys.stderr, flush=True)
    return scored, skipped


def _scored(name: str, file: str, row: Mapping[str, Any] | NotExpressible, models: Models) -> Scored | Skipped:
    """A row priced, or why not: whatever a row holds, those after it are still priced."""
    try:
        if isinstance(row, NotExpressible):
            raise row
        case = case_of(row)
        return Scored(name, file, case, *price_row(case, models))
    except (NotExpressible, AutoparError) as error:
        return Skipped(name, str(error))
    except Exception as error:
        return Skipped(name, f"could not be priced: {type(error).__name__}: {error}")


def report(files: Sequence[Path], jobs: int = 1) -> dict[str, Any]:
    """All figures of some files, priced in so many processes (a file in one)."""
    every, out = list[Scored](), dict[str, Any](files={})
    start = time.time()
    names = _named_apart(files)
    for path, (scored, skipped) in zip(names, _score_all(list(names), jobs), strict=True):
        scored = [replace(one, file=names[path]) for one in scored]
        every += scored
        out["files"][names[path]] = {
            **summary(scored),
            "rows": [one.to_json() for one in scored],
            "skipped": [vars(one) for one in skipped],
        }
    out["overall"] = summary(every)
    out["left_out"] = left_out(every)
    out["seconds"] = time.time() - start
    return out


def _named_apart(files: Sequence[Path]) -> dict[Path, str]:
    """The files, each once, and what each is called: its name, or its whole path where names are the same."""
    once: dict[Path, Path] = {}
    for path in files:
        once.setdefault(path.resolve(), path)
    names = Counter(path.stem for path in once.values())
    return {path: path.stem if names[path.stem] == 1 else str(path) for path in once.values()}


def _score_all(files: Sequence[Path], jobs: int) -> list[tuple[list[Scored], list[Skipped]]]:
    if jobs == 1:
        models = Models()
        return [score_file(path, models) for path in files]
    # The largest files first, so that no process is left with one at the end.
    order = sorted(files, key=lambda path: -path.stat().st_size if path.is_file() else 0)
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=4) as pool:
        found = dict(zip(order, pool.map(_score_apart, order, chunksize=1), strict=True))
    return [found[path] for path in files]


def _score_apart(path: Path) -> tuple[list[Scored], list[Skipped]]:
    return score_file(path, Models())


def _without_lists(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if not isinstance(value, (list, dict))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    parser.add_argument("--jobs", type=int, default=1, help="price files in so many processes")
    given = parser.parse_args(arguments)
    found = report(given.files, max(1, given.jobs))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, one in (*found["files"].items(), ("overall", found["overall"])):
        for part, found_there in ((name, one), (f"{name}, chosen", one["open"])):
            if found_there is one or found_there["priced"]:
                print(f"{part:28} {_without_lists(found_there)}")
    print(f"speeds fitted without the file: {found['left_out']}")


if __name__ == "__main__":
    main()
