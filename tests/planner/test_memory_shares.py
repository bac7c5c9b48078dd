"""Shares of rows where devices differ in memory: what each may hold, which shares are tried, and plans that fit only in
these."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.ir.microbatching import ONCE
from autopar.ir.node import TensorType
from autopar.ir.placements import REPLICATE, Placements, UnequalShard
from autopar.optimizers import optimizer_bytes
from autopar.placement.rooms import Room, counted_bytes, rooms_of
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.prepare import prepare
from autopar.planner.row_shares import bisected, divided
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.runtime.rehearse.rehearsal import _Record, rehearse
from autopar.runtime.rehearse.storage_meter import StorageMeter
from autopar.search import stage_problems, without_stages
from autopar.search.reprice import reprice
from autopar.search.stage_meshes import StageLayout
from tests.helpers.planning import requested
from tests.helpers.unequal_devices import ROWS, Wide, batch_of, bench, bytes_of, hardware, planned, with_memory
from tests.planner.test_row_shares import _all_divisions, _line


def test_gradients_in_one_buffer_each_have_their_own_bytes() -> None:
    """Those that are reduced together; whatever else the buffer has is divided among them."""
    with StorageMeter() as meter:
        record = _Record(meter, [])
        buffer = torch.empty(12, device="meta")
        parts = [buffer[:2], buffer[2:8], buffer[8:11]]
        record.add("gradient", parts, ["a", "b", "c"])
        record.add("gradient", parts[:1], ["a"])
        record.add("activation", parts, ["d", "e", "f"])
    held = record.footprint(parts).held
    assert {name: count for (kind, name), count in held.items()} == {"a": 8, "b": 26, "c": 14}
    assert record.footprint(parts).gradients == 48


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_no_division_within_the_most_rows_finishes_sooner(rows: int, lines: list[tuple[float, float, int]]) -> None:
    finish, most = [partial(_line, *line[:2]) for line in lines], [line[2] for line in lines]
    found = divided(rows, finish, most)
    allowed = (
        [d for d in _all_divisions(rows, len(lines)) if all(n <= m for n, m in zip(d, most, strict=True))]
        if rows >= len(lines)
        else []
    )
    if not allowed:
        assert found == ()
        return

    def last(division: tuple[int, ...]) -> float:
        return max(each(count) for each, count in zip(finish, division, strict=True))

    assert found in allowed
    assert last(found) <= min(map(last, allowed)) * (1 + 1e-12)


def _bytes_at(tensors: list[tuple[TensorType, Placements]], room: Room, mesh: tuple[int, ...]) -> int:
    return sum(room.bytes_of(kind, place, mesh) for kind, place in tensors)


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.data(),
    st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=6),
)
def test_what_is_within_the_limit_fits_into_every_room(
    shares: list[int], data: st.DataObject, sizes: list[tuple[bool, int]]
) -> None:
    limits = data.draw(st.lists(st.integers(50, 4000), min_size=len(shares), max_size=len(shares)))
    assume(len(set(limits)) > 1)
    mesh, divided_so = (len(shares),), tuple(shares)
    rooms = rooms_of(limits, mesh, (divided_so,), None)
    assert [room.limit for room in rooms] == limits
    tensors: list[tuple[TensorType, Placements]] = [
        (TensorType((sum(shares), n), torch.float32), (UnequalShard(0, divided_so) if is_divided else REPLICATE,))
        for is_divided, n in sizes
    ]
    counted = sum(counted_bytes(kind, place, mesh, rooms) for kind, place in tensors)
    held = [_bytes_at(tensors, room, mesh) for room in rooms]
    if counted <= min(limits):
        assert all(nbytes <= room.limit for nbytes, room in zip(held, rooms, strict=True))
    # Where shares are those of memory nothing is lost: only rounding of each tensor.
    if len({limit / share for limit, share in zip(limits, shares, strict=True)}) == 1:
        fullest = max(nbytes * min(limits) / room.limit for nbytes, room in zip(held, rooms, strict=True))
        assert counted <= fullest + len(tensors)


def test_rooms_of_stages() -> None:
    shares = ((3, 1),)
    assert rooms_of((8, 4, 6, 4), (2,), shares, 0) == (Room((0,), 8), Room((1,), 4))
    assert rooms_of((8, 4, 6, 4), (2,), shares, None) == (Room((0,), 14), Room((1,), 8))
    # All of them together may hold as much in either place.
    assert rooms_of((8, 8, 4, 4), (2,), shares, None) == () == rooms_of((8, 8, 4, 4), (2,), shares, 1)
    assert rooms_of((8, 4), (2,), (), None) == ()
    assert rooms_of((8, 4, 7, 4), (2, 2), ((), (3, 1)), None) == (Room((0, 0), 7), Room((0, 1), 4))


def check_peaks(plan: Plan) -> None:
    """Each device's predicted peak is that of its own program, compiled and rehearsed, and within its own limit."""
    assert all(place.optimizer == (REPLICATE,) for place in plan.parameters.values())
    types = [TensorType(tuple(p.shape), p.dtype) for p in bench().model.parameters()]
    state = sum(int(optimizer_bytes("adamw", kind)) for kind in types)
    for rank, program in enumerate(bench().programs(plan)):
        footprint = rehearse(program, hardware("S").backend)
        update = 2 * max(int(kind.bytes) for kind in types)
        own = max(footprint.peak, footprint.stored + footprint.accumulated + update) + state
        assert plan.device_peaks[rank] == own <= plan.device_limits[rank]


def check_computes_the_same(plan: Plan) -> None:
    computed = bench().run(plan)
    for name, value in bench().expected().items():
        torch.testing.assert_close(computed[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_rows_follow_memory_where_they_would_not_fit_otherwise() -> None:
    limits = bytes_of(4.5), bytes_of(20)
    plan = planned("SS", limits)
    assert plan.shares == ((1, 2),)  # No device is quicker: 4 rows are the most of the first.
    assert plan.device_limits == limits
    check_peaks(plan)
    check_computes_the_same(plan)
    # The tightest is what the plan speaks of.
    assert plan.predicted.peak_bytes == plan.device_peaks[0] and plan.memory_limit == limits[0] == plan.least_limit
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
    plan.validate()
    assert "devices differ in speed and memory" in str(plan) and "rank 0: " in str(plan)


@pytest.mark.slow
def test_without_shares_by_memory_it_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match="no plan on mesh"):
        planned("SS", (bytes_of(4.5), bytes_of(4.5)))


def test_an_even_division_that_fits_is_preferred() -> None:
    """Devices are as quick, so rows in proportion to memory would only make the one with more of it the last."""
    plan = planned("SS", (bytes_of(6.5), bytes_of(20)))
    assert not any(plan.shares) and plan.device_peaks == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "expected"),
    [(20, 9), (7.5, 7), (4.5, 4)],
)
def test_a_quick_device_has_as_many_rows_as_it_can_hold(most: float, expected: int) -> None:
    """Three times as quick, it would have nine of twelve rows; of what fits, the most are the quickest."""
    plan = planned("FS", (bytes_of(most), bytes_of(20)))
    ((fast, slow),) = plan.shares
    assert fast * ROWS // (fast + slow) == expected
    if expected != 9:
        check_peaks(plan)
    check_computes_the_same(plan)


@pytest.mark.slow
def test_a_slow_device_of_much_memory_has_no_more_rows_than_it_needs() -> None:
    """Memory of the quick one suffices for its share by speed: nothing else is tried."""
    plan = planned("FS", (bytes_of(9.5), bytes_of(9.5)))
    free = planned("FS", (bytes_of(40), bytes_of(41)))
    assert plan.shares == free.shares
    assert plan.predicted.step_seconds == pytest.approx(free.predicted.step_seconds)


@pytest.mark.slow
def test_stages_have_rows_in_proportion_to_memory() -> None:
    """Two stages of two devices, of which the first of each has little memory."""
    asked: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "gpipe"}
    alike = planned("SSSS", **asked).predicted.peak_bytes
    limits = int(0.85 * alike), 3 * alike, int(0.85 * alike), 3 * alike
    plan = planned("SSSS", limits, **asked)
    ((few, many),) = plan.shares
    assert few < many and plan.stages == 2
    assert plan.device_limits == limits
    assert all(peak <= limit for peak, limit in zip(plan.device_peaks, limits, strict=True))
    assert plan.device_peaks[0] < plan.device_peaks[1] and plan.device_peaks[2] < plan.device_peaks[3]
    assert plan.pipeline is not None
    for stage in (0, 1):
        held = list(zip(plan.device_peaks, limits, strict=True))[2 * stage : 2 * stage + 2]
        peak, limit = max(held, key=lambda pair: pair[0] / pair[1])
        assert (plan.pipeline.peaks[stage], plan.pipeline.limits[stage]) == (peak, limit)
    plan.validate()
    assert Plan.from_json(plan.to_json()) == plan
    check_computes_the_same(plan)


@pytest.mark.slow
def test_another_batch_keeps_to_the_limit_of_each_device() -> None:
    plan = planned("SS", (bytes_of(4.5), bytes_of(20)))
    prepared = prepare(Wide(), (), {"x": batch_of()}, device="cpu", loss_fn=None)
    cluster = with_memory(hardware("S", "S"), bytes_of(4.5), bytes_of(20))
    smaller = reprice(plan, prepared, 6, cluster=cluster)
    assert smaller.shares == ((1, 2),) and smaller.device_limits == plan.device_limits
    assert all(less < more for less, more in zip(smaller.device_peaks, plan.device_peaks, strict=True))


def test_bisection_finds_the_first_that_has_enough() -> None:
    for enough in range(9):
        tried: list[int] = []

        def solve(division: Any, tried: list[int] = tried) -> int | None:
            tried.append(division)
            return None if division < enough - 2 else division  # noqa: B023

        found = bisected(range(8), solve, lambda division: division < enough)  # type: ignore[arg-type]  # noqa: B023
        assert len(tried) <= 4
        assert enough == 8 or enough in found


def test_bisection_goes_towards_the_quickest_from_what_is_too_slow() -> None:
    for enough in range(8):
        for slow in range(enough + 1, 9):
            tried: list[int] = []

            def solve(division: Any, tried: list[int] = tried) -> int:
                tried.append(division)
                if division >= slow:  # noqa: B023
                    raise TooSlowError("plans", 1.0)
                return division

            found = bisected(range(8), solve, lambda division: division < enough)  # type: ignore[arg-type]  # noqa: B023
            assert len(tried) <= 4
            assert enough in found


@pytest.mark.parametrize("too_slow", [True, False])
def test_rows_are_divided_by_memory_only_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, too_slow: bool) -> None:
    error = TooSlowError("plans", 1.0) if too_slow else InfeasibleError("nothing fits")
    sought: list[bool] = []

    def by_memory(*_: object) -> tuple[()]:
        sought.append(True)
        return ()

    asked = requested("plain", (2,), hardware("S", "F"))
    for module, solve in ((without_stages, "solve_mesh"), (stage_problems, "solve_only")):
        monkeypatch.setattr(module, "divisions_by_memory", by_memory)
        monkeypatch.setattr(module, solve, Mock(side_effect=error))
    assert not without_stages.plans_without_stages(asked, Timings()).candidates
    programs = stage_problems.StagePrograms(asked, StageLayout(1, (2,), (0,)), math.inf, Timings())
    with pytest.raises(InfeasibleError):
        programs.solve(asked.graph, ONCE, 1.0, 1.0)
    assert len(sought) == (0 if too_slow else 2)
    step, division = step_graph(asked.graph, asked.loss, asked.batch), ((2,), ())
    if too_slow:
        with pytest.raises(TooSlowError):
            without_stages._in_division(asked, step, Timings(), division)
        with pytest.raises(TooSlowError):
            programs._in_division(asked, step, division)
    else:
        assert without_stages._in_division(asked, step, Timings(), division) is None
        assert programs._in_division(asked, step, division) is None
