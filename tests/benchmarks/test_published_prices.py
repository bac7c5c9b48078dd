"""Prices of presets against published rows that no constant was fitted on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.hardware_rows import (
    PUBLISHED,
    collective_rows,
    is_held_out,
    product_rows,
    unusable_rows,
)
from benchmarks.prices import MESSAGE, Priced, figures, price_collective, price_product, summary


def held_out(priced: list[Priced | None]) -> list[Priced]:
    return [row for row in priced if row is not None and row.held_out]


def test_collectives_of_rows_not_fitted() -> None:
    rows = [row for row in collective_rows() if row.kind != MESSAGE]
    priced = held_out([price_collective(row) for row in rows])
    assert len(priced) > 500
    assert summary(priced)["error"] < 0.15  # type: ignore[operator]
    gathers = [row for row in priced if row.group[1:] == ("GB200-NVL72", "all_gather")]
    assert summary(gathers)["error"] < 0.08  # type: ignore[operator]


def test_products_of_rows_not_fitted() -> None:
    priced = held_out([price_product(row) for row in product_rows() if row.dtype == "bf16"])
    assert len(priced) > 100
    assert summary(priced)["error"] < 0.07  # type: ignore[operator]


def test_a_third_is_held_out_for_good() -> None:
    names = [f"row {i}" for i in range(3000)]
    assert sum(map(is_held_out, names)) == pytest.approx(1000, rel=0.1)
    assert is_held_out("collectives:1655dea18b") == is_held_out("collectives:1655dea18b")


def test_files_never_seen_are_read_and_what_cannot_be_priced_is_counted(tmp_path: Path) -> None:
    known = json.loads((PUBLISHED / "collectives.jsonl").read_text().splitlines()[0])
    strange = {**known, "id": "x", "cluster": {**known["cluster"], "gpu": "abacus"}}
    silent = {**known, "id": "y", "measured": {"op": "all_reduce", "bytes": None, "busbw_GBps": 3.0}}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (known, strange, silent)))
    empty = tmp_path / "none.jsonl"
    empty.write_text("")
    found = figures(collective_rows(path), product_rows(empty))
    assert found["collectives"]["rows"] == 1  # type: ignore[index]
    assert found["left_out"] == {"hardware not described: abacus": 1}
    assert unusable_rows(path, empty)["collective without bytes or time"] == 1
