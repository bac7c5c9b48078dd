"""Sharded weights against pipelines: which rows are compared, and that prices put them in the measured order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.published import price_row
from benchmarks.published_rows import case_of
from benchmarks.published_scores import Scored
from benchmarks.zero_against_pipelines import RESULTS, ROWS, all_pairs, kind_of, line, paired, pairs_of
from tests.helpers.published_row import MODELS, change, made_up

CLUSTER = {"gpu": "A100-80GB-SXM", "n_gpus": 8, "gpus_per_node": 8}
SHARDED = made_up(
    cluster=CLUSTER, parallel={"t": 1, "p": 1, "d": 8, "microbatch": 1, "global_batch": 16, "zero_stage": 3}
)
STAGES = {**change(SHARDED, "parallel", p=2, d=4, zero_stage=1), "id": "stages"}


def scored(*rows: dict[str, Any]) -> list[Scored]:
    cases = [case_of(row) for row in rows]
    return [Scored(row["id"], "", case, *price_row(case, MODELS)) for row, case in zip(rows, cases, strict=True)]


def test_rows_are_compared_with_those_of_the_other_kind_and_the_same_source_model_and_device() -> None:
    both = change(STAGES, "parallel", zero_stage=3)
    neither = change(SHARDED, "parallel", zero_stage=1)
    others = [
        {**STAGES, "source": "somebody else"},
        change(STAGES, "model", layers=8),
        change(STAGES, "cluster", gpu="H100"),
    ]
    rows = [SHARDED, STAGES, both, neither, *others]
    assert [kind_of(case_of(row)) for row in rows[:4]] == ["sharded", "pipelined", "", ""]
    (group,) = paired((str(at), case_of(row)) for at, row in enumerate(rows))
    assert [name for name, _ in group] == ["0", "1"]


def test_a_pair_is_compared_by_device_seconds_of_a_sample() -> None:
    slow = {**SHARDED, "measured": {"iter_s": 0.06}}
    wide = change(change(STAGES, "cluster", n_gpus=16), "parallel", d=8, global_batch=16)
    same, wider = pairs_of(scored(slow, STAGES, wide))
    assert same.measured == pytest.approx(1.2) and wider.measured == pytest.approx(0.6)
    assert same.is_apart and same.is_comparable and not wider.is_comparable
    assert same.predicted == pytest.approx(same.sharded.predicted / same.pipelined.predicted)
    assert same.is_right == (same.predicted > 1) and ("right" if same.is_right else "WRONG") in line(same)


def test_committed_figures_hold_the_order() -> None:
    pairs = json.loads(RESULTS.read_text())["pairs"]
    apart = [pair for pair in pairs if pair["differ_by_more_than_a_tenth"]]
    assert len(apart) >= 7 and all(pair["right"] for pair in apart)


@pytest.mark.slow
def test_table_two_is_in_the_measured_order() -> None:
    """A committed figure of prices, priced anew; the committed file would not notice a price that changes."""
    pairs = all_pairs([ROWS / "megatron_sc21_table2.jsonl"])
    assert len(pairs) == 8 and all(pair.is_right for pair in pairs)
    table = {
        (pair["sharded"]["row"], pair["pipelined"]["row"]): pair for pair in json.loads(RESULTS.read_text())["pairs"]
    }
    for pair in pairs:
        committed = table[str(pair.sharded.case.row["row"]), str(pair.pipelined.case.row["row"])]
        assert pair.predicted == pytest.approx(committed["predicted_ratio"], rel=0.01)
