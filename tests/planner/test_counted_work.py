"""Without a time limit no clock decides which plan is found, even where the work that solvers may do cuts them off."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from autopar import options as settings
from autopar.compiler import plan_cache
from autopar.compiler.plan_cache import cached_plan
from autopar.options import Options
from autopar.planner.request import PlanRequest
from autopar.planner.shared_work import SharedWork
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import requested


def wide() -> Case:
    return Stack(layers=2, width=32, hidden=64), text(8, 8)


def hard() -> PlanRequest:
    """A request under a limit of memory at which no solver proves its gap soon."""
    free = best_plan(requested(wide, (4,)), Timings())
    return requested(wide, (4,), memory_limit=int(0.7 * free.predicted.peak_bytes), gap=1e-5)


def hurry(monkeypatch: pytest.MonkeyPatch, times: float = 1e4) -> None:
    """Clocks as on a machine so many times slower, or busier."""
    for name in ("process_time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, partial(_faster, getattr(time, name), times))


def _faster(clock: Any, times: float) -> float:
    return float(times * clock())


def timeless(plan: Plan) -> Plan:
    """``plan`` without what it took, by clocks."""
    return replace(plan, timings={})


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_no_clock_decides_which_plan_is_found(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(settings, "COUNTED_SECONDS", seconds)
    request, timings = hard(), [Timings() for _ in range(3)]
    first = best_plan(request, timings[0])
    assert timings[0].cut_off and first.status == "feasible"
    again = best_plan(request, timings[1])  # Shares with the first what they have in common.
    hurry(monkeypatch)
    other = best_plan(replace(request, shared=SharedWork()), timings[2])
    assert timeless(again) == timeless(other) == timeless(first)
    assert timings[0].solving == timings[1].solving == timings[2].solving


def test_the_work_that_was_spent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "COUNTED_SECONDS", 0.0)
    plan = best_plan(requested("stack", (2, 2)), Timings())
    assert any("all the work that is counted by default" in warning for warning in plan.warnings)


@pytest.mark.parametrize("time_limit", [None, 0.0])
def test_a_plan_that_counted_work_cut_off_is_kept(monkeypatch: pytest.MonkeyPatch, time_limit: float | None) -> None:
    """Planning again would find the same; within a time limit it may find more."""
    monkeypatch.setattr(settings, "COUNTED_SECONDS", 0.0)
    written = list[str]()
    monkeypatch.setattr(plan_cache, "write", lambda kind, key, text: written.append(key))
    plan_cache.forget()
    cached_plan(requested("stack", (2, 2), time_limit=time_limit), Timings())
    assert bool(written) == (time_limit is None)


@pytest.mark.parametrize("time_limit, seconds", [(None, 60.0), (5.0, 5.0), (0, 0)])
def test_a_limit_that_is_given_is_in_seconds_of_a_processor(time_limit: float | None, seconds: float) -> None:
    options = Options(time_limit=time_limit)
    assert options.solver_seconds == seconds and Timings().counts(options) == (time_limit is None)
    assert Timings(counted=True).counts(options)


def test_a_share_of_counted_work_is_kept_for_what_comes_next() -> None:
    timings, counted = Timings(solving=100.0), Options()
    timings.reserve(counted, 0.5)
    assert timings.left(counted) == pytest.approx(0.5 * counted.solver_seconds)
    timings.solving = 1.0
    timings.reserve(counted, 0.5)
    assert timings.solving == 1.0
    limited = Timings(solving=9.0)
    limited.reserve(Options(time_limit=10.0), 0.5)
    assert limited.left(Options(time_limit=10.0)) == pytest.approx(1.0)
