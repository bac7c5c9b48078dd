"""Programs of all ranks rehearsed on fake tensors of CUDA: a part of ``benchmarks.rehearse_cuda``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.precision import Precision
from autopar.runtime.rehearse.fake_device import fake_device
from benchmarks.rehearse_cuda import measure


@pytest.mark.parametrize("precision", ["bf16", pytest.param(None, marks=pytest.mark.slow)])
def test_all_ranks_of_all_kinds_of_plans_run(precision: Precision | None) -> None:
    rows = measure("gpt2", precision)
    assert [row["plan"] for row in rows] == ["best", "sharded", "random", "stages"]
    assert [row.get("wrong") for row in rows] == [[], [], [], []]
    assert all(row["peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.02) for row in rows)
    assert sum(row["collectives"] for row in rows) > 1000


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        (1, (5, 6)),
        (slice(1, 3), (2, 5, 6)),
        ((..., 2), (4, 5)),
        ((slice(None), None, 0), (4, 1, 6)),
        ((slice(-1, None), ..., slice(0, 4)), (1, 5, 4)),
    ],
    ids=str,
)
def test_indexing_needs_no_device(key: Any, shape: tuple[int, ...]) -> None:
    with fake_device():
        assert torch.empty(4, 5, 6, device="cuda")[key].shape == shape


def test_indexing_by_tensors_needs_no_device() -> None:
    with fake_device():
        rows = torch.empty(4, 5, 6, device="cuda")[torch.empty(3, dtype=torch.int64, device="cuda")]
    assert (rows.shape, rows.device.type) == ((3, 5, 6), "cuda")


def test_reading_a_value_and_mixing_devices_are_errors() -> None:
    with fake_device():
        x = torch.empty(4, device="cuda")
        with pytest.raises(RuntimeError):
            x.sum().item()
        with pytest.raises(RuntimeError, match="device"):
            x + torch.empty(4)
