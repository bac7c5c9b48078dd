"""A training that is killed again and again under ``autopar run`` ends as one that is not. Kills of ranks without the
launcher, and in every moment of a save, are in tests/runtime/checkpoint."""

from __future__ import annotations

import pytest

from benchmarks.kills import EVERY, measure, summary


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_hundred_kills_are_survived(seed: int) -> None:
    """Twenty in each run."""
    figures = summary([measure(20, ranks=2, seed=seed)])
    assert figures["survived"] == figures["kills"] == 20
    assert figures["equal_losses"] is True
    lost = figures["steps_lost"]
    # One interval, or two if the last checkpoint was being written, and the steps until the kill was noticed.
    assert isinstance(lost, dict) and lost["most"] <= 3 * EVERY
