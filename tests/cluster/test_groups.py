"""Clusters of several kinds of device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cluster.description import Cluster, Device, Group, Link
from autopar.cost import compute_seconds, usable_bytes
from autopar.errors import OptionsError

BIG = Device("big", {"f32": 4e9, "bf16": 9e9}, 1 << 34, 4e8, 1e-6, sustained=0.9)
SMALL = Device("small", {"f32": 1e9}, 1 << 33, 1e8, 3e-6, reserve_fraction=0.1)
LINKS = (Link("board", 2, 1e8, 1e-6), Link("net", None, 1e7, 1e-5))
MIXED = Cluster("mixed", "made up", links=LINKS, groups=(Group(2, BIG), Group(3, SMALL)))


def test_round_trip_and_hash() -> None:
    text = MIXED.to_toml()
    assert "\n[device]" not in text
    assert Cluster.from_toml(text) == MIXED
    assert hash(Cluster.from_toml(text)) == hash(MIXED)
    assert hash(MIXED.with_groups(Group(3, BIG), Group(2, SMALL))) != hash(MIXED)


def test_ranks_have_the_device_of_their_group() -> None:
    assert MIXED.size == 5
    assert [MIXED.at(rank, 1).device for rank in range(5)] == [BIG, BIG, SMALL, SMALL, SMALL]
    assert MIXED.at(0, 2).device == BIG
    assert MIXED.at(2, 3).device == SMALL
    assert MIXED.at(0, 2).groups == ()


def test_devices_in_step_are_as_slow_as_the_slowest_and_as_small_as_the_smallest() -> None:
    both = MIXED.at(1, 2)
    assert both.device == MIXED.device
    assert usable_bytes(both) == usable_bytes(MIXED.at(2, 1))
    for work, nbytes in ((1e9, 0.0), (0.0, 1e9), (0.0, 0.0), (1e9, 1e9)):
        for matrix in (None, (512.0, 512.0, 512.0)):
            each = [compute_seconds(MIXED.at(r, 1), work, nbytes, torch.float32, matrix) for r in (0, 4)]
            assert compute_seconds(both, work, nbytes, torch.float32, matrix) >= max(each)


def test_one_kind_in_groups_is_that_kind() -> None:
    assert MIXED.with_groups(Group(1, BIG), Group(4, BIG)).device == BIG


def test_fewer_devices_leave_out_those_that_are_not_used() -> None:
    assert MIXED.among(5) is MIXED
    assert MIXED.among(2).device == BIG
    assert MIXED.among(3).groups == (Group(2, BIG), Group(1, SMALL))
    assert MIXED.of_devices(4).groups == (Group(2, BIG), Group(2, SMALL))
    assert Cluster.get("dgx-h100").among(3) is not None
    with pytest.raises(OptionsError, match="has 5 devices, not 6"):
        MIXED.among(6)


def test_errors_say_what_to_change() -> None:
    with pytest.raises(OptionsError, match="has no device; give one, or groups"):
        Cluster("none", "made up", links=LINKS)
    with pytest.raises(OptionsError, match="leave device out"):
        replace(MIXED, device=BIG)
    with pytest.raises(OptionsError, match="its groups have 5 devices, and link 'net' joins 4"):
        replace(MIXED, links=(LINKS[0], replace(LINKS[1], size=4)))
    with pytest.raises(OptionsError, match="has 0 devices; give at least 1"):
        Group(0, BIG)
    with pytest.raises(OptionsError, match=r"groups\[1\]: count is 'two', not a whole number"):
        Cluster.from_toml(MIXED.to_toml().replace("count = 3", 'count = "two"'))


def test_a_name_is_no_device() -> None:
    with pytest.raises(
        OptionsError, match=r"is 'dgx-h100', not a Device; Cluster.get\('dgx-a100-80gb'\).device is one"
    ):
        Group(2, "dgx-h100")  # type: ignore[arg-type]
