"""Prices of collectives, messages and matrix products against published measurements: ``python -m benchmarks.prices``.

For each source and hardware the mean absolute error relative to what was measured, of the rows constants were fitted on
and of the third that was held out of every fit (:mod:`benchmarks.fit_hardware`). Other files of the same format may be
named; rows that cannot be priced are counted with the reason.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autopar.cost import collective_seconds, compute_seconds
from autopar.cost.collective.point_to_point import message_rate

from .hardware_rows import (
    MESSAGE,
    PUBLISHED,
    CollectiveRow,
    ProductRow,
    collective_rows,
    dtype_of,
    product_rows,
    unusable_rows,
)
from .report import describe_machine, emit, make_table

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Priced:
    """One row: what was measured and what it is priced at, in seconds. ``large``: of at least a mebibyte, or 10
    GFLOP, where size decides and not starting."""

    group: tuple[str, str, str]
    measured: float
    predicted: float
    held_out: bool
    large: bool

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1.0)


def price_collective(row: CollectiveRow) -> Priced | None:
    """None where it is not known on which hardware it was measured."""
    if row.cluster is None:
        return None
    if row.kind == MESSAGE:
        apart = row.cluster.links[0].size if row.nodes > 1 else 1
        latency, bandwidth = message_rate(row.cluster, 0, apart or 1, 1)
        predicted = latency + row.nbytes / bandwidth
    else:
        predicted = collective_seconds(row.cluster, (row.members,), row.kind, (0,), row.nbytes)
    large = row.nbytes >= MEBIBYTE * (row.members if row.kind == "all_to_all" else 1)
    where = row.gpu if row.nodes == 1 else f"{row.gpu}, {row.nodes} nodes"
    return Priced((row.source, where, row.kind), row.seconds, predicted, row.held_out, large)


def price_product(row: ProductRow) -> Priced:
    """Of a short run, at the clock of one."""
    cluster, dtype = dtype_of(row.cluster, row.dtype)
    cluster = replace(cluster, device=replace(cluster.device, sustained=1.0))
    m, n, k = row.matrix
    flops = 2.0 * row.batch * m * n * k
    predicted = compute_seconds(cluster, flops, row.nbytes, dtype, row.matrix)
    return Priced((row.source, row.gpu, f"product {row.dtype}"), row.seconds, predicted, row.held_out, flops >= 1e10)


def summary(rows: Sequence[Priced]) -> dict[str, float | int | None]:
    """Mean absolute relative errors, None where there is no such row."""

    def mean(chosen: Iterable[Priced]) -> float | None:
        errors = [row.error for row in chosen]
        return round(float(np.mean(errors)), 4) if errors else None

    return {
        "rows": len(rows),
        "error": mean(rows),
        "error_held_out": mean(row for row in rows if row.held_out),
        "error_large": mean(row for row in rows if row.large),
        "error_large_held_out": mean(row for row in rows if row.large and row.held_out),
    }


def figures(collectives: Sequence[CollectiveRow], products: Sequence[ProductRow]) -> dict[str, object]:
    """Errors by (source, hardware, kind), by hardware, and of all; and what was left out."""
    tried = [(row, price_collective(row)) for row in collectives]
    priced = [found for _, found in tried if found is not None] + [price_product(row) for row in products]
    unknown = Counter(row.gpu for row, found in tried if found is None)
    groups: dict[tuple[str, str, str], list[Priced]] = defaultdict(list)
    hardware: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for found in priced:
        groups[found.group].append(found)
        hardware[found.group[1], found.group[2].partition(" ")[0]].append(found)
    return {
        "groups": [dict(zip(("source", "hardware", "what"), k, strict=True)) | summary(v) for k, v in groups.items()],
        "hardware": [dict(zip(("hardware", "what"), k, strict=True)) | summary(v) for k, v in hardware.items()],
        "collectives": summary([p for p in priced if not p.group[2].startswith(("product", MESSAGE))]),
        "messages": summary([p for p in priced if p.group[2] == MESSAGE]),
        "products": summary([p for p in priced if p.group[2].startswith("product")]),
        "left_out": {f"hardware not described: {gpu}": count for gpu, count in unknown.items()},
    }


def _percent(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", type=Path, default=PUBLISHED / "collectives.jsonl")
    parser.add_argument("--products", type=Path, default=PUBLISHED / "gemm.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", help="write the JSON to this file too")
    options = parser.parse_args()
    found = figures(collective_rows(options.collectives), product_rows(options.products))
    left = found["left_out"]
    assert isinstance(left, dict)
    left |= unusable_rows(options.collectives, options.products)
    columns = ("error", "error_held_out", "error_large", "error_large_held_out")
    lines = [
        [f"{row['source']}: {row['hardware']}, {row['what']}", str(row["rows"]), *(_percent(row[c]) for c in columns)]
        for row in found["groups"]  # type: ignore[attr-defined]
    ]
    for name in ("collectives", "messages", "products"):
        row = found[name]
        lines.append([f"all {name}", str(row["rows"]), *(_percent(row[c]) for c in columns)])  # type: ignore[index]
    heads = ("rows", "number", "error", "held out", "large", "large, held out")
    caption = "Left out: " + "; ".join(f"{reason} ({count})" for reason, count in left.items())
    table = make_table("Mean absolute error of prices", heads, lines, caption)
    emit({"machine": describe_machine(), **found}, table, options.json, options.out)


if __name__ == "__main__":
    main()
