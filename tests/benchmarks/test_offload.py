"""The figures of the benchmark of memory beyond the device."""

from __future__ import annotations

from autopar.options import Options
from benchmarks.offload import WAYS


def test_every_way_is_an_option_and_changes_a_part() -> None:
    assert all(Options(offload=offload).offload == offload for offload, _ in WAYS.values())
    assert {part for _, part in WAYS.values()} == {"update", "rest"}
