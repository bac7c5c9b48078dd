"""What trainers do beside training is in the predicted seconds of their rows, and of no others."""

from __future__ import annotations

import pytest

from benchmarks.published import price_row
from benchmarks.published_rows import case_of
from benchmarks.published_scores import Scored
from tests.helpers.published_row import MODELS, made_up

ROW = made_up(cluster={"gpu": "A100-80GB-SXM", "n_gpus": 8}, parallel={"t": 1, "p": 1, "d": 8, "global_batch": 16})


def test_composers_metrics_read_and_write_the_logits_of_each_rank() -> None:
    other, theirs = (case_of({**ROW, "source": source}) for source in ("others 2023", "MosaicML llm-foundry 2023"))
    logits = 16 * 128 * theirs.shape.vocab / 8
    assert other.beside_seconds == 0.0
    assert theirs.beside_seconds == pytest.approx(2 * 14 * logits / theirs.cluster.device.memory_bandwidth)
    scored = Scored("one", "file", theirs, *price_row(theirs, MODELS))
    assert scored.predicted == scored.priced.predicted.step_seconds + theirs.beside_seconds
    assert scored.flops_per_second < scored.priced.flops_per_second
    assert scored.to_json()["parts"]["beside"] == theirs.beside_seconds
