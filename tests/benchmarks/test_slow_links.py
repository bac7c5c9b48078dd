"""The figures of the benchmark of slow links."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autopar.options import Options
from benchmarks.slow_links import EXCHANGES, row, slow_cluster


def test_seconds_to_the_target_lie_between_two_looks() -> None:
    curve = [(0, 0.0, 5.0), (5, 10.0, 4.0), (10, 20.0, 2.0)]
    found = row({"curve": curve, "plan": SimpleNamespace(sync=None), "looking_seconds": 1.0}, 3.0)
    assert found["seconds_to_target"] == pytest.approx(15.0) and found["seconds_per_step"] == 2.0
    assert (
        row({"curve": curve, "plan": SimpleNamespace(sync=None), "looking_seconds": 1.0}, 1.0)["seconds_to_target"]
        is None
    )


def test_every_exchange_is_one_and_links_are_slow() -> None:
    assert all(Options(sync=sync).sync == sync for sync in EXCHANGES.values())
    assert slow_cluster(100).links[-1].bandwidth == pytest.approx(11.875e6)
