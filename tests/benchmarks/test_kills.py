"""A training that is killed again and again under ``autopar run`` ends as one that is not. Ten kills of ranks without
the launcher are in tests/runtime/checkpoint/test_checkpointer.py."""

from __future__ import annotations

import pytest

from benchmarks.kills import EVERY, measure


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [3, 100])
def test_kills_are_survived(kills: int) -> None:
    figures = measure(kills, ranks=2, seed=1)
    assert figures["survived"] == kills
    assert figures["equal_losses"] is True
    lost = figures["steps_lost"]
    # One interval, or two if the last checkpoint was being written, and the steps until the kill was noticed.
    assert isinstance(lost, dict) and lost["most"] <= 3 * EVERY
