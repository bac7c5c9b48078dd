"""Shares of rows in proportion to speed: the best division, and plans that have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Options
from autopar.cluster.description import Group
from autopar.errors import OptionsError
from autopar.ir.placements import Placements, UnequalShard, is_valid, parse_placements, short
from autopar.ir.row_shares import apportioned, rank_shares
from autopar.planner.prepare import prepare
from autopar.planner.row_shares import divided
from autopar.plans.plan import Plan
from autopar.search.reprice import reprice
from tests.helpers.unequal_devices import hardware


class Rows(nn.Module):
    """A few weights that many rows pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))).square().mean()


def batch_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, 300, 16, generator=torch.Generator().manual_seed(0))


def test_devices_of_groups_that_a_mesh_leaves_out_are_named() -> None:
    cluster = hardware("F", "F", "S")
    part, whole = (autopar.plan(Rows(), (n,), batch_of(6), cluster=cluster) for n in (2, 3))
    assert "the first 2 of its 3 devices" in " ".join(str(part).split())
    assert "of its 3 devices" not in " ".join(str(whole).split())


def _all_divisions(rows: int, devices: int) -> Iterator[tuple[int, ...]]:
    if devices == 1:
        yield (rows,)
        return
    for first in range(1, rows - devices + 2):
        yield from ((first, *rest) for rest in _all_divisions(rows - first, devices - 1))


def _line(fixed: float, each: float, rows: int) -> float:
    return fixed + each * rows


@given(st.integers(1, 9), st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=1, max_size=4))
def test_no_division_finishes_sooner(rows: int, lines: list[tuple[float, float]]) -> None:
    finish = [partial(_line, *line) for line in lines]
    found = divided(rows, finish)
    if rows < len(lines):
        assert found == ()
        return

    def last(division: tuple[int, ...]) -> float:
        return max(each(count) for each, count in zip(finish, division, strict=True))

    assert sum(found) == rows
    assert last(found) <= min(map(last, _all_divisions(rows, len(lines)))) * (1 + 1e-12)


@given(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_apportioned_rows_are_all_rows_and_leave_no_device_without(rows: int, shares: list[int]) -> None:
    taken = apportioned(rows, shares)
    if rows < len(shares):
        assert taken == ()
        return
    assert sum(taken) == rows
    assert min(taken) >= 1
    if rows % sum(shares) == 0:
        assert taken == tuple(rows // sum(shares) * share for share in shares)


def test_ranks_share_what_their_place_on_the_axis_does() -> None:
    assert rank_shares(1, (2, 2), ((3, 1), ())) == (3, 3, 1, 1)
    assert rank_shares(2, (2,), ((3, 1),)) == (3, 1, 3, 1)
    assert rank_shares(2, (2,), ()) == ()


def test_placements_are_read_as_they_are_written() -> None:
    placements: Placements = (UnequalShard(0, (3, 1)), UnequalShard(1, (1, 2, 4), 5))
    assert short(placements) == "(S(0:3+1),S(1/5:1+2+4))"
    assert parse_placements(short(placements)) == placements
    assert is_valid(placements, (8, 35), (2, 3))
    assert not is_valid(placements, (6, 35), (2, 3))  # 6 rows are not a multiple of 4,
    assert not is_valid(placements, (8, 35), (3, 3))  # and two shares are not for three devices.


@cache
def planned(*devices: str, rows: int = 8, **options: Any) -> Plan:
    asked = Options(stages=1, **{name: dict(v) if name == "pins" else v for name, v in options.items()})
    return autopar.plan(Rows(), (len(devices),), (batch_of(rows),), cluster=hardware(*devices), options=asked)


def test_a_plan_says_who_has_which_rows(tmp_path: Path) -> None:
    plan = planned("F", "S")
    ((many, few),) = plan.shares
    assert many > few
    rows = f"rows   dp: {many * 8 // (many + few)}+{few * 8 // (many + few)} of 8 rows"
    assert rows in str(plan)
    assert f"S(0:{many}+{few})" in str(plan)
    plan.to_html(tmp_path / "plan.html")
    assert rows.removeprefix("rows   ") in (tmp_path / "plan.html").read_text()
    assert Plan.from_json(plan.to_json()) == plan
    assert not any(planned("F", "F").shares)


def test_it_is_quicker_than_equal_rows_by_its_prices() -> None:
    found, slow = planned("F", "S"), planned("S", "S")
    assert found.shares == ((3, 1),)
    assert found.predicted.step_seconds < 0.55 * slow.predicted.step_seconds
    assert found.predicted.step_seconds == pytest.approx(sum(line.seconds for line in found.lines))
    assert found.objective == pytest.approx(found.predicted.step_seconds)


def test_pins_name_shares() -> None:
    plan = planned("F", "S", pins=(("first", "S(0:5+3)"),))
    assert plan.shares == ((5, 3),)
    # Also on devices that are all alike.
    assert planned("F", "F", pins=(("first", "S(0:5+3)"),)).shares == ((5, 3),)
    with pytest.raises(OptionsError, match="several ways"):
        planned("F", "S", pins=(("first", "S(0:5+3)"), ("last", "S(0:7+1)")))
    with pytest.raises(OptionsError, match="first"):
        planned("F", "S", pins=(("first", "S(0:5+2)"),))  # 8 rows are no multiple of 7.


def test_several_kinds_take_an_axis_of_all_devices() -> None:
    plan = planned("F", "S", "S", "F", rows=9)
    assert plan.mesh == (4,)
    (shares,) = plan.shares
    assert shares[1] == shares[2] < min(shares[0], shares[3])


def test_other_batches_are_priced_with_rows_shared_anew() -> None:
    plan = planned("F", "S")
    prepared = prepare(Rows(), (batch_of(8),), {}, device="cpu", loss_fn=None)
    other = reprice(plan, prepared, 13, cluster=hardware("F", "S"))
    ((many, few),) = other.shares
    assert many + few == 13
    assert many > few
    assert other.predicted.step_seconds > plan.predicted.step_seconds


def test_devices_of_different_memory_keep_to_the_smallest() -> None:
    both = hardware("F", "S")
    fast, slow = (group.device for group in both.groups)
    small = replace(slow, memory_bytes=1 << 20, reserve_bytes=0, reserve_fraction=0.0)
    cluster = both.with_groups(Group(1, fast), Group(1, small))
    plan = autopar.plan(Rows(), (2,), (batch_of(8),), cluster=cluster, options=Options(stages=1))
    assert plan.memory_limit == 1 << 20
    assert plan.predicted.peak_bytes <= plan.memory_limit
