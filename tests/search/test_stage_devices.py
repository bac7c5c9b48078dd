"""Stages on devices of several kinds: prices, limits, cuts and orders."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import Options
from autopar.cluster.description import Cluster, Device, Group
from autopar.errors import InfeasibleError, OptionsError
from autopar.plans.plan import Plan
from autopar.plans.views.stages import modules_of_chunks
from autopar.schedule.check import check
from autopar.schedule.named import SCHEDULES, make_schedule
from autopar.search.schedules.cuts import best_cuts
from autopar.search.stage_devices import MOST_ORDERS, orders
from tests.helpers.planning import slow_devices
from tests.passes.test_cut import _make
from tests.search.test_cuts import make

SLOW = replace(slow_devices().device, name="slow")


def at_speed(factor: float, name: str) -> Device:
    """A device that is so many times quicker in everything."""
    return replace(
        SLOW,
        name=name,
        peak_flops={dtype: rate * factor for dtype, rate in SLOW.peak_flops.items()},
        memory_bandwidth=SLOW.memory_bandwidth * factor,
        launch_seconds=SLOW.launch_seconds / factor,
        view_seconds=SLOW.view_seconds / factor,
    )


FAST = at_speed(3.0, "fast")


def cluster(*devices: Device) -> Cluster:
    return slow_devices().with_groups(*(Group(1, device) for device in devices))


@cache
def planned(devices: tuple[str, ...], **options: Any) -> Plan:
    kinds = {"slow": SLOW, "fast": FAST}
    model, batch = _make("gpt2")
    hardware = cluster(*(kinds[name] for name in devices))
    return autopar.plan(model, (len(devices),), batch, cluster=hardware, options=Options(**options))


def busy(plan: Plan) -> list[float]:
    """Seconds of computing of each rank."""
    return [
        sum(line.seconds for line in plan.lines if line.kind == "compute" and line.stage == stage)
        for stage in range(plan.stages)
    ]


def test_each_chunk_has_the_seconds_of_its_devices() -> None:
    slow, fast = make([3.0] * 4), make([1.0] * 4)
    assert best_cuts([slow, fast], (1, 1), [np.inf] * 2) == ("n1",)
    assert best_cuts([fast, slow], (1, 1), [np.inf] * 2) == ("n3",)


def test_each_chunk_has_the_memory_of_its_devices() -> None:
    alike = make([1.0] * 4, [1.0] * 4)
    assert best_cuts([alike, alike], (1, 1), [1.0, 3.0]) == ("n1",)
    assert best_cuts([alike, alike], (1, 1), [3.0, 1.0]) == ("n3",)
    assert best_cuts([alike, alike], (1, 1), [1.0, 2.0]) is None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_orders_are_permutations_that_differ_in_kinds(named: list[int]) -> None:
    kinds = [named.index(kind) for kind in named]
    found = orders(kinds, [float(kind) for kind in kinds], [1.0 + kind for kind in kinds])
    assert found[0] == tuple(range(len(kinds)))
    assert all(sorted(order) == list(range(len(kinds))) for order in found)
    sequences = [tuple(kinds[block] for block in order) for order in found]
    assert len(set(sequences)) == len(sequences)
    every = set(itertools.permutations(kinds)) if len(kinds) < 6 else set()
    if every and len(every) <= MOST_ORDERS:
        assert set(sequences) == every


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_reordered_schedule_still_runs(name: str) -> None:
    schedule = make_schedule(name, 3, 4)
    for order in itertools.permutations(range(3)):
        moved = schedule.reordered(order)
        check(moved)
        assert [moved.held[order[rank]] for rank in range(3)] == list(schedule.held)
        assert [moved.ranks[order[rank]] for rank in range(3)] == list(schedule.ranks)


@pytest.mark.slow
def test_alike_groups_plan_as_one_kind() -> None:
    model, batch = _make("gpt2")
    options = Options(stages=2, microbatches=4)
    one_kind = autopar.plan(model, (2,), batch, cluster=replace(slow_devices(), device=SLOW), options=options)
    groups = planned(("slow", "slow"), stages=2, microbatches=4)
    assert groups.pipeline is not None and one_kind.pipeline is not None
    assert groups.pipeline.cuts == one_kind.pipeline.cuts
    assert groups.predicted.step_seconds == pytest.approx(one_kind.predicted.step_seconds)


def test_the_quick_device_gets_more_of_the_model() -> None:
    plan = planned(("slow", "fast"), stages=2, microbatches=4, schedule="1f1b")
    assert plan.pipeline is not None and plan.pipeline.devices == ("slow", "fast")
    sizes = [sum(len(modules_of_chunks(plan).get(c, ())) for c in held) for held in plan.pipeline.schedule.held]
    assert sizes[1] > sizes[0]
    slow, fast = busy(plan)
    assert 3.0 * fast > 1.5 * slow  # In seconds of the slow device.
    equal = planned(("slow", "slow"), stages=2, microbatches=4, schedule="1f1b")
    assert plan.predicted.step_seconds < 0.7 * equal.predicted.step_seconds


@pytest.mark.slow
def test_the_order_of_the_stages_is_searched() -> None:
    pipeline = planned(("slow", "fast", "slow"), stages=3, microbatches=4).pipeline
    assert pipeline is not None
    given_order = planned(("slow", "slow", "fast"), stages=3, microbatches=4)
    assert given_order.predicted.step_seconds == pytest.approx(
        planned(("slow", "fast", "slow"), stages=3, microbatches=4).predicted.step_seconds, rel=0.02
    )


@pytest.mark.slow
def test_stages_are_found_where_one_stage_would_wait_for_the_slowest() -> None:
    plan = planned(("slow", "fast"))
    assert plan.stages == 2
    assert plan.predicted.step_seconds < min(b.step_seconds for b in plan.baselines.values() if b is not None)


@pytest.mark.slow
def test_a_stage_holds_what_its_own_devices_can() -> None:
    plan = planned(("slow", "slow"), stages=2, microbatches=4, schedule="1f1b")
    assert plan.pipeline is not None
    peaks = plan.pipeline.peaks
    small = replace(SLOW, name="small", memory_bytes=int(0.8 * min(peaks)), reserve_bytes=0, reserve_fraction=0.0)
    model, batch = _make("gpt2")
    options = Options(stages=2, microbatches=4, schedule="1f1b", recompute="none", offload=False)
    for devices in ((small, SLOW), (SLOW, small)):
        found = autopar.plan(model, (2,), batch, cluster=cluster(*devices), options=options).pipeline
        assert found is not None
        assert all(peak <= limit for peak, limit in zip(found.peaks, found.limits, strict=True))
        assert found.limits[devices.index(small)] == small.memory_bytes
    with pytest.raises(InfeasibleError):
        autopar.plan(model, (2,), batch, cluster=cluster(small, small), options=options)


def test_a_plan_keeps_devices_and_limits_in_json() -> None:
    plan = planned(("slow", "fast"), stages=2, microbatches=4, schedule="1f1b")
    plan.validate()
    again = Plan.from_json(plan.to_json())
    assert again.pipeline == plan.pipeline
    assert "fast" in str(plan)


def test_replicas_on_several_kinds_are_refused() -> None:
    model, batch = _make("gpt2")
    with pytest.raises(OptionsError, match="groups of different devices"):
        autopar.plan(model, (2,), batch, cluster=cluster(SLOW, FAST), options=Options(sync=autopar.LocalSGD(every=2)))


def test_pins_of_all_stages_are_an_order_to_try() -> None:
    kinds, seconds = tuple(range(6)), [1.0, 5.0, 2.0, 4.0, 3.0, 6.0]
    asked = (4, 0, 5, 1, 3, 2)
    assert asked not in orders(kinds, seconds, seconds)
    assert orders(kinds, seconds, seconds, [-1, *asked, -1])[-1] == asked
    assert orders(kinds, seconds, seconds, asked[1:]) == orders(kinds, seconds, seconds)
    assert orders((0, 0), [1.0, 1.0], [1.0, 1.0], [1, 0]) == ((0, 1),)
