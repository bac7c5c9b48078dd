"""Rows divided among devices in proportion to their speed, on processes: loss and every gradient are those of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import autopar
from autopar import Options
from autopar.plans.plan import Plan
from autopar.runtime.launch import run_local
from tests.helpers.unequal_devices import Wide, bytes_of, hardware, with_memory
from tests.helpers.unequal_devices import batch_of as wide_batch
from tests.passes.test_cut import _make

WIDTH, CLASSES = 24, 7


class Tied(nn.Module):
    """A table used at both ends, batch statistics between them, and a mean over labels of which some do not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.mix = nn.Embedding(CLASSES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.norm(self.table(ids).mean(1)))
        return F.cross_entropy(x @ self.table.weight.t(), ids[:, 0], ignore_index=0)


def batch_of(rows: int) -> torch.Tensor:
    return torch.randint(CLASSES, (rows, 5), generator=torch.Generator().manual_seed(rows))


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("FS", 8, {"zero": 0}),
    ("SF", 5, {"zero": 3}),
    ("FSSF", 9, {"zero": 1}),
    ("SFFS", 8, {"precision": "bf16"}),
]
QUICK = 1


@pytest.mark.parametrize(
    ("devices", "rows", "options"),
    [pytest.param(*case, marks=[] if i == QUICK else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_equal_to_one_process(devices: str, rows: int, options: dict[str, Any]) -> None:
    report = autopar.verify(
        Tied(), (len(devices),), (batch_of(rows),), cluster=hardware(*devices), timeout=250,
        options=Options(stages=1, **options),
    )  # fmt: skip
    assert report.ok, str(report)
    assert report.unpriced == ()
    (shares,) = report.plan.shares
    assert rows % sum(shares) == 0
    assert min(n for n, name in zip(shares, devices, strict=True) if name == "F") > shares[devices.index("S")]
    assert Plan.from_json(report.plan.to_json()) == report.plan
    assert Plan.from_text(report.plan.to_text()).shares == (shares,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("gpt2", "FS", {"stages": 1, "microbatches": 2}),
        ("gpt2", "FSFS", {"stages": 2, "microbatches": 2}),
        ("t5", "SF", {"stages": 1}),
    ],
)
def test_microbatches_and_stages(name: str, devices: str, options: dict[str, Any]) -> None:
    model, batch = _make(name)
    report = autopar.verify(
        model, (len(devices),), batch, cluster=hardware(*devices), timeout=250, options=Options(**options)
    )
    assert report.ok, str(report)
    assert report.unpriced == ()
    assert any(report.plan.shares)


def _trains(rank: int, world: int) -> tuple[tuple[tuple[int, ...], ...], list[int], list[float]]:
    data = torch.cat([batch_of(8), batch_of(6), batch_of(2)])
    model = autopar.parallelize(
        Tied(), (world,), example_inputs=(batch_of(8),), cluster=hardware("F", "S"), options=Options(stages=1, zero=3)
    )
    sampler = model.sampler(14, 8)
    read = [len(indices) for indices in sampler]
    losses = [float(model.step(*sampler.from_local(ids))) for ids in DataLoader(data, batch_sampler=sampler)]
    # Of two rows, each rank has one.
    losses.append(float(model.step(data[14:])))
    return model.plan.shares, read, losses


def test_each_rank_reads_its_rows_and_other_batches_are_shared_anew() -> None:
    data = torch.cat([batch_of(8), batch_of(6), batch_of(2)])
    one = Tied()
    expected = [float(one(ids).detach()) for ids in (data[:8], data[8:14], data[14:])]
    found = run_local(_trains, 2, timeout=250)
    (((many, few),), first, _), (_, second, _) = found
    assert (first[0], second[0]) == (many * 8 // (many + few), few * 8 // (many + few))
    assert first[0] > second[0] > 0
    assert first[1] + second[1] == 6
    for _, _, losses in found:
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("devices", "rows"),
    [("SS", (4.5, 20.0)), pytest.param("FS", (5.5, 20.0), marks=pytest.mark.slow)],
)
def test_rows_by_memory_equal_one_process(devices: str, rows: tuple[float, ...]) -> None:
    limits = [bytes_of(own) for own in rows]
    cluster = with_memory(hardware(*devices), *limits)
    report = autopar.verify(
        Wide(), (len(devices),), (wide_batch(),), cluster=cluster, timeout=250,
        options=Options(stages=1, microbatches=1, recompute="none", offload=False, zero=0),
    )  # fmt: skip
    assert report.ok, str(report)
    assert report.unpriced == ()
    ((few, many),) = report.plan.shares
    assert few < many
    assert report.plan.device_limits == tuple(limits)
