"""The figures of the benchmark of memory beyond the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.options import Options
from benchmarks.offload import WAYS, table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "offload.json"


def test_every_way_is_an_option_and_changes_a_part() -> None:
    assert all(Options(offload=offload).offload == offload for offload, _ in WAYS.values())
    assert {part for _, part in WAYS.values()} == {"update", "rest"}


def test_committed_figures_are_of_these_ways_and_changed_no_loss() -> None:
    found = json.loads(RESULTS.read_text())
    assert [row["offloaded"] for row in found["ways"]] == list(WAYS)
    assert all(row["same_losses"] for row in found["ways"])
    for row in found["ways"]:
        for part, error in row["error"].items():
            assert error == pytest.approx(row["predicted"][part] / row["measured"][part] - 1)
    assert table(found).row_count == len(WAYS)
