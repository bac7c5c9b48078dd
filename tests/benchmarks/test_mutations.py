"""Files of every kind that are read, changed at random: no internal error."""

from __future__ import annotations

import pytest

from benchmarks.mutations import measure


@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_changed_files_are_refused_or_read(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "off")  # Restored afterwards: the files have a folder of their own.
    rows = measure(count, seed=1)
    assert len(rows) >= 12
    for kind, row in rows.items():
        assert row["internal_errors"] == 0, kind
        assert row["refused"] + row["read"] == count
