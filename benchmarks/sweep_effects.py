"""How much of the order within sweeps any price could have: beside our prices, a model that was told the answers.

``python -m benchmarks.sweep_effects benchmarks/published/alephalpha_layouts.jsonl`` takes the predictions of
``benchmarks/results/published.json`` and prints for each sweep Kendall's tau of our prices, and of an additive model of
the logarithm of the measured seconds with an effect for every value of every field that varies in the sweep, by least
squares on the sweep itself; the latter also with each row predicted from the others (the leave-one-out residual of a
linear model, e / (1 - h)). What even such a model puts in the wrong order are interactions, or noise of measuring.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.solver.problem import Floats

from .published_rows import case_of, read_rows
from .published_scores import LEAST, kendall
from .published_shape import NotExpressible

TAUS = ("ours", "told", "told_of_the_others")
RESULTS = Path(__file__).parent / "results" / "published.json"


def effects(rows: Sequence[Mapping[str, Any]]) -> Floats:
    """The design matrix [rows, 1 + effects]: a constant, and for each field of ``parallel`` an indicator of every value
    but the first."""
    columns = [np.ones(len(rows))]
    for name in sorted({name for row in rows for name in row}):
        said = [str(row.get(name)) for row in rows]
        columns += [np.array([one == value for one in said], dtype=np.float64) for value in sorted(set(said))[1:]]
    return np.stack(columns, 1)


def fitted(design: Floats, measured: Floats) -> tuple[Floats, Floats]:
    """Least squares, and each row as the others predict it (nan where no other row has one of its values)."""
    hat = design @ np.linalg.pinv(design)
    whole, leverage = hat @ measured, np.diag(hat)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = measured - (measured - whole) / (1 - leverage)
    return whole, np.where(leverage < 1 - 1e-9, apart, np.nan)


def figures(path: Path, results: Path = RESULTS) -> list[dict[str, Any]]:
    """For each sweep of at least four timed rows the taus, and how many rows and effects there are."""
    scored = json.loads(results.read_text())["files"][path.stem]["rows"]
    timed = {row["id"]: row for row in scored if row["error"] is not None}
    found: dict[object, list[dict[str, Any]]] = {}
    for row in read_rows(path):
        if not isinstance(row, NotExpressible) and row.get("id") in timed:
            found.setdefault(case_of(row).sweep, []).append(dict(row))
    return [_figures(rows, timed) for rows in found.values() if len(rows) >= LEAST]


def _figures(rows: Sequence[Mapping[str, Any]], timed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    design = effects([row["parallel"] for row in rows])
    ours, measured = (
        np.log([timed[row["id"]][name] for row in rows]) for name in ("predicted_seconds", "published_seconds")
    )
    whole, apart = fitted(design, measured)
    return {
        "first": rows[0]["id"],
        "rows": len(rows),
        "effects": int(np.linalg.matrix_rank(design)) - 1,
        "ours": _tau(ours, measured),
        "told": _tau(whole, measured),
        "told_of_the_others": _tau(apart, measured),
    }


def _tau(guessed: Floats, measured: Floats) -> float | None:
    """Kendall's tau-a of the rows that are guessed; None if they are too few."""
    pairs = [(guess, said) for guess, said in zip(guessed.tolist(), measured.tolist(), strict=True) if guess == guess]
    return kendall(pairs) if len(pairs) >= LEAST else None


def line(found: Mapping[str, Any]) -> str:
    taus = {name.replace("_", " "): found[name] for name in TAUS}
    told = ", ".join(f"{name} {'too few' if tau is None else format(tau, '.2f')}" for name, tau in taus.items())
    return f"{found['first']:30} {found['rows']:3} rows {found['effects']:3} effects, Kendall's tau: {told}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sweep_effects", description="The order any price could have.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    for path in asked.files:
        for one in figures(path, asked.results):
            print(line(one))


if __name__ == "__main__":
    main()
