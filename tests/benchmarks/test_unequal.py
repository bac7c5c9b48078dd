"""The plans that the benchmark of unequal processes compares."""

from __future__ import annotations

import pytest

from autopar.ir.placements import parse_placements, shares_of
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


def test_the_cluster_has_the_shares_that_processes_are_held_to() -> None:
    unequal, alike = clusters()
    rates = [unequal.at(rank, 1).device.peak_flops["f32"] for rank in range(len(SHARES))]
    assert [rate / rates[0] for rate in rates] == pytest.approx([share / SHARES[0] for share in SHARES])
    assert sum(rates) == pytest.approx(len(SHARES) * alike.device.peak_flops["f32"])
    assert unequal.device.peak_flops == unequal.at(2, 1).device.peak_flops


def test_what_is_found_is_told_of_the_shares_and_equal_divisions_are_not() -> None:
    plans = asked()
    assert plans[FOUND][0] == Options()
    assert bool(plans[FOUND][1].groups)
    assert not any(plans[name][1].groups for name in EQUAL)
