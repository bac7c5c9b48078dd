"""Plans beside published rows: which rows a plan can have, and what a row says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from autopar.layout import Layout
from benchmarks.published_plans import cases_of, plain_layout, planned_rows, spread, summary
from benchmarks.published_rows import case_of
from tests.helpers.published_row import change, made_up

ROW = made_up(
    cluster={"gpu": "A100-80GB-SXM", "n_gpus": 8, "gpus_per_node": 8, "inter": "8x HDR IB 200 Gb/s per node"},
    parallel={"t": 2, "p": 2, "d": 2, "microbatch": 1, "global_batch": 8, "recompute": "full", "zero_stage": 1},
)
changed = partial(change, ROW)


def written(rows: list[object], folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_row_restricts_a_plan_by_its_layout_alone() -> None:
    layout = plain_layout(case_of(ROW))
    assert type(layout) is Layout
    assert (layout.tensor, layout.pipeline, layout.data, layout.zero, layout.recompute) == (2, 2, 2, 1, "full")


@pytest.mark.parametrize("fields", [{"precision": "fp8"}, {"recompute": "SAC op"}])
def test_what_no_plan_does_is_left_out(fields: dict[str, str]) -> None:
    assert plain_layout(case_of(changed("parallel", **fields))) is None


def test_rows_without_a_time_or_a_layout_are_left_out(tmp_path: Path) -> None:
    untimed = change(ROW, "measured", iter_s=None, oom=True)
    path = written([ROW, untimed, "no row", changed("parallel", precision="fp8")], tmp_path)
    assert len(list(cases_of(path))) == 1


def test_rows_are_evenly_spread() -> None:
    assert spread(range(9), 3) == [0, 4, 8]
    assert spread(range(2), 3) == [0, 1]
    assert spread(range(9), 1) == [0]


def test_a_row_is_planned_beside_its_published_time(tmp_path: Path) -> None:
    rows, failed = planned_rows([written([ROW], tmp_path)], most=1)
    assert not failed
    assert rows[0].published == 0.05 and rows[0].predicted > 0
    assert summary(rows)["mean_error"] == pytest.approx(rows[0].predicted / 0.05 - 1)
