"""What the kit found, for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.report import make_table

from .setting import Row

# How far losses may be from eager's, relative (benchmarks/gpu/train.py).
LOSS_TOLERANCE = 1e-2
# Operations listed for a model, the slowest. Chosen: a screen.
_LISTED = 15


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows of training with what eager tells of them: the error of losses, and the ratio of seconds."""
    eager = {row["case"].split(" ")[0]: row for row in rows if row["case"].endswith(" eager") and "losses" in row}
    found = []
    for row in rows:
        like = eager.get(row["case"].split(" ")[0])
        if like is not None and "losses" in row:
            pairs = zip(row["losses"], like["losses"], strict=True)
            errors = [abs(own / expected - 1) for own, expected in pairs]
            error = math.inf if any(map(math.isnan, errors)) else max(errors)
            row = {**row, "loss_error": error, "equal": error <= LOSS_TOLERANCE}
            row["of_eager"] = row["step_seconds"] / like["step_seconds"]
        found.append(row)
    return found


def table(part: str, rows: Sequence[Row]) -> Table:
    """The rows of a part."""
    columns, cells, caption = _TABLES[part]
    lines = [[row["case"], *(_failure(row, len(columns)) or cells(row))] for row in _listed(part, rows)]
    return make_table(part, ("", *columns), lines, caption)


def _listed(part: str, rows: Sequence[Row]) -> list[Row]:
    if part != "ops":
        return list(rows)
    seen: dict[str, int] = {}
    listed = []
    for row in rows:
        model = row["case"].split(" ")[0]
        seen[model] = seen.get(model, 0) + 1
        if seen[model] <= _LISTED:
            listed.append(row)
    return listed


def _failure(row: Row, count: int) -> list[str]:
    said = row.get("error") or row.get("left")
    return [str(said).splitlines()[0][:100], *[""] * (count - 1)] if said else []


def _calibrated(row: Row) -> list[str]:
    rates = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in row["peak_flops"].items())
    return [rates, f"{row['memory_bandwidth'] / 1e9:.0f}", f"{row['launch_seconds'] * 1e6:.1f}"]


def _message(row: Row) -> list[str]:
    return [str(row["calls"]), "equal" if row["equal"] else "; ".join(row["wrong"])[:150]]


def _program(row: Row) -> list[str]:
    return [
        "equal" if row["equal"] else "DIFFERS", f"{row['error_found']:.1e}", f"{row['allowed']:.1e}", row["at"][:60],
    ]  # fmt: skip


def _feature(row: Row) -> list[str]:
    found = [f"{row[key]:.1e}" if key in row else "" for key in ("error_found", "allowed")]
    return ["equal" if row["equal"] else "DIFFERS", *found, str(row.get("at", ""))[:60]]


def _experts(row: Row) -> list[str]:
    each = (*row["seconds"], *row["predicted_seconds"])
    error = f"{row['error_found']:.1e}" if "error_found" in row else ""
    return [*(f"{seconds * 1e3:.2f}" for seconds in each), error]


def _trained(row: Row) -> list[str]:
    predicted = row.get("predicted_seconds"), row.get("predicted_bytes")
    return [
        f"{row['step_seconds'] * 1e3:.1f}",
        f"{row['of_eager']:.2f}" if "of_eager" in row else "",
        "" if predicted[0] is None else f"{predicted[0] * 1e3:.1f}",
        f"{row['rows_per_second']:.0f}",
        f"{row['mfu']:.1%}" if row["mfu"] is not None else "",
        f"{row['peak_bytes'] / 2**30:.2f}",
        "" if predicted[1] is None else f"{predicted[1] / 2**30:.2f}",
        f"{row['loss_error']:.1e}" if "loss_error" in row else "",
        f"{row['ready_seconds']:.0f}",
    ]


def _operation(row: Row) -> list[str]:
    ratio = row["predicted_seconds"] / row["seconds"] if row["seconds"] else 0.0
    return [str(row["count"]), f"{row['seconds'] * 1e3:.3f}", f"{row['predicted_seconds'] * 1e3:.3f}", f"{ratio:.2f}"]


_TABLES: Mapping[str, tuple[tuple[str, ...], Callable[[Row], list[str]], str]] = {
    "calibrate": (("TFLOP/s", "GB/s", "launch us"), _calibrated, "as fitted to what was measured"),
    "messages": (("calls", ""), _message, "collectives against the same done by hand"),
    "programs": (("", "error", "allowed", "at"), _program, "all ranks of a plan on (2, 2) in one process, and eager"),
    "features": (("", "error", "allowed", "at"), _feature, "what the runtime does beside a plain step, and torch"),
    "experts": (
        ("forward ms", "backward", "predicted", "backward", "error"),
        _experts,
        "blocks of experts; the error is that of groups, relative to expert by expert",
    ),
    "train": (
        ("ms", "of eager", "predicted", "rows/s", "MFU", "GiB", "predicted", "loss error", "ready s"),
        _trained,
        "a step of forward, backward and AdamW in bf16; its peak of memory; losses against eager's",
    ),
    "ops": (("count", "ms", "predicted ms", "ratio"), _operation, f"the {_LISTED} slowest kinds of operations of each"),
}


def summary(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence for people."""
    rows = [row for part in parts.values() for row in part["rows"]]
    compared = [row["equal"] for row in rows if "equal" in row]
    failed, left = sum("error" in row for row in rows), sum("left" in row for row in rows)
    return (
        f"{sum(compared)} of {len(compared)} comparisons are equal; {failed} failed, {left} were left for lack of time"
    )
