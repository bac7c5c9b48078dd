"""The plans that the benchmark of unequal processes compares."""

from __future__ import annotations

import math

import pytest

from autopar.calibration.measure_device import DeviceSamples, MatrixSample
from autopar.calibration.samples import CollectiveSample, Samples
from autopar.ir.placements import parse_placements, shares_of
from autopar.ir.program import COLLECTIVES
from autopar.options import Options
from benchmarks.pipeline_plans import BATCH
from benchmarks.unequal import BY_HAND, EQUAL, FOUND, LAYERS, SHARES, asked, clusters


def test_ten_plans_by_hand_place_every_layer_or_row() -> None:
    assert len(BY_HAND) == 10
    for name, options in BY_HAND.items():
        if name.startswith("rows"):
            (shares,) = (shares_of(p) for text in options.pins.values() for p in parse_placements(text))
            assert len(shares) == len(SHARES)
            assert sum(shares) == BATCH
            continue
        assert set(options.pins) == {f"transformer.h.{layer}" for layer in range(LAYERS)}
        assert {text.removeprefix("stage ") for text in options.pins.values()} == set(map(str, range(options.stages)))


def _samples(share: float) -> Samples:
    """Of a process that has ``share`` of a core of 1 GFLOP/s, and waits a second for the slowest unless it is that."""
    sizes = ((64, 64, 64), (256, 256, 256), (512, 512, 512))
    matrices = tuple(MatrixSample("f32", *size, 1e-5 + 2e-9 * math.prod(size) / share) for size in sizes)
    device = DeviceSamples(
        matrices=matrices, pointwise=((1 << 16, 1e-4 / share), (1 << 20, 1.6e-3 / share)), launch=1e-5, view=1e-6
    )
    collectives = tuple(
        CollectiveSample(kind, members, nbytes, 1e-4 + members * nbytes / 1e9)
        for kind in COLLECTIVES for members in (2, 4) for nbytes in (1 << 10, 1 << 16, 1 << 20)
    )  # fmt: skip
    return Samples(device, collectives, synchronisation=1e-4 + (share > min(SHARES)))


def test_the_cluster_has_the_speeds_that_processes_measured() -> None:
    unequal, alike = clusters([_samples(share) for share in SHARES])
    rates = [unequal.at(rank, 1).device.peak_flops["f32"] for rank in range(len(SHARES))]
    assert [rate / rates[0] for rate in rates] == pytest.approx([share / SHARES[0] for share in SHARES], rel=0.1)
    assert min(rates) < alike.device.peak_flops["f32"] < max(rates)
    assert unequal.synchronisation_seconds == pytest.approx(1e-4)
    assert unequal.links == alike.links


def test_what_is_found_is_told_of_the_shares_and_equal_divisions_are_not() -> None:
    plans = asked(*clusters([_samples(share) for share in SHARES]))
    assert plans[FOUND][0] == Options()
    assert bool(plans[FOUND][1].groups)
    assert not any(plans[name][1].groups for name in EQUAL)
