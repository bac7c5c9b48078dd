"""Solver-made schedules: right by the checker, never slower than the named ones, quicker where chunks are uneven."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost import ChunkPrice, EdgePrice, PipelinePrices, simulate
from autopar.errors import InfeasibleError, ScheduleError
from autopar.schedule.actions import Action, Edge
from autopar.schedule.check import check
from autopar.schedule.messages import complete
from autopar.schedule.named import make_schedule
from autopar.schedule.schedule import Schedule, chain, loop_placement, v_placement
from autopar.search.schedules.schedule_solver import OPTIMAL, SolvedSchedule, named_schedules, solve_schedule


def uneven(*times: float, backward: float = 1.0, wire: float = 0.1) -> PipelinePrices:
    """A chain of chunks with these forward times; each microbatch holds one byte per chunk."""
    chunks = tuple(ChunkPrice(t, 1.1 * t * backward, 0.7 * t * backward, until_weight_gradient=1.0) for t in times)
    return PipelinePrices(chunks, {edge[:2]: EdgePrice(latency=wire) for edge in chain(len(times))})


def assert_holds(solved: SolvedSchedule, prices: PipelinePrices) -> None:
    check(solved.schedule, "blocking")
    assert solved.seconds == simulate(solved.schedule, prices).seconds
    assert 0 <= solved.bound <= solved.seconds
    assert all(solved.seconds <= seconds for _, seconds in solved.named)
    assert (solved.status == "optimal") == (solved.gap <= OPTIMAL)


def test_heavy_embedding_and_head_gain() -> None:
    prices = uneven(3, 1, 1, 2, wire=0.5)
    solved = solve_schedule(prices, loop_placement(4, 1), 8, chain(4))
    assert_holds(solved, prices)
    named = dict(solved.named)
    assert set(named) == {"gpipe", "1f1b", "zb-h1"}
    assert (solved.schedule.name, solved.status) == ("solved", "optimal")
    assert solved.seconds < 0.97 * named["zb-h1"] and solved.seconds < 0.93 * named["1f1b"]


def test_in_the_memory_of_1f1b_a_heavy_embedding_gains() -> None:
    """The zero-bubble schedule, which holds more, does not fit there."""
    prices = uneven(2, 1, 1, 1, wire=0.5)
    solved = solve_schedule(prices, loop_placement(4, 1), 8, chain(4), (4.0, 3.0, 2.0, 1.0))
    assert_holds(solved, prices)
    assert [name for name, _ in solved.named] == ["1f1b"]
    assert solved.seconds < 0.95 * dict(solved.named)["1f1b"]


def test_uneven_chunks_of_interleaved_stages_gain_much() -> None:
    prices = uneven(1.5, 1, 1, 1, 1, 1, 1, 2)
    solved = solve_schedule(prices, loop_placement(4, 2), 8, chain(8))
    assert_holds(solved, prices)
    assert solved.schedule.name == "solved"
    assert solved.seconds < 0.9 * min(seconds for _, seconds in solved.named)


def test_a_memory_limit_under_which_no_named_schedule_fits() -> None:
    prices, limits = uneven(*(1.0,) * 8), (5.0,) * 8
    solved = solve_schedule(prices, loop_placement(8, 1), 16, chain(8), limits)
    assert_holds(solved, prices)
    assert solved.named == () and solved.schedule.name == "solved"
    assert max(simulate(solved.schedule, prices).peak_bytes) <= 5
    free = solve_schedule(prices, loop_placement(8, 1), 16, chain(8))
    assert free.seconds < solved.bound


def test_bytes_of_waiting_messages_count() -> None:
    """Three microbatches fit, but not with their messages."""
    chunks = tuple(ChunkPrice(1, 1, 1, until_weight_gradient=100.0) for _ in range(3))
    prices = PipelinePrices(chunks, {edge[:2]: EdgePrice(10.0, 1000.0) for edge in chain(3)})
    solved = solve_schedule(prices, loop_placement(3, 1), 5, chain(3), (305.0,) * 3)
    assert_holds(solved, prices)
    assert max(simulate(solved.schedule, prices).peak_bytes) <= 305


def test_equal_stages_keep_the_named_schedule_that_is_best() -> None:
    prices = PipelinePrices((ChunkPrice(1, 1, 1),) * 4)
    solved = solve_schedule(prices, loop_placement(4, 1), 8, chain(4))
    assert (solved.schedule.name, solved.status, solved.seconds) == ("zb-h1", "optimal", 27)


def test_the_same_problem_has_the_same_schedule() -> None:
    prices = uneven(2, 1, 1, 1, 1, 2, wire=0.7)
    first, second = (solve_schedule(prices, loop_placement(3, 2), 4, chain(6), time_limit=0.5) for _ in range(2))
    assert first == second


def test_chunks_that_lie_anyhow() -> None:
    """No named schedule has this placement; edges cross ranks, stay, and skip."""
    edges = (*chain(4), Edge(0, 2), Edge(0, 3, gradient=False))
    prices = uneven(3, 1, 1, 2)
    solved = solve_schedule(prices, (0, 0, 1, 0), 3, edges)
    assert_holds(solved, prices)
    assert solved.named == ()
    assert solved.schedule.name == "solved"


def test_too_large_is_said_and_the_best_known_returned() -> None:
    prices = uneven(2, *(1.0,) * 15)
    solved = solve_schedule(prices, loop_placement(16, 1), 32, chain(16))
    check(solved.schedule, "blocking")
    assert (solved.status, solved.bound < solved.seconds) == ("too large", True)
    assert solved.seconds <= min(seconds for _, seconds in solved.named)


def test_computations_that_take_no_time_keep_an_order_that_can_run() -> None:
    """Everything begins at once; the solver is asked because reducing keeps the bound from being met."""
    prices = PipelinePrices((*(ChunkPrice(0, 0, 0),) * 3, ChunkPrice(0, 0, 0, reduce=1.0)))
    assert_holds(solve_schedule(prices, v_placement(2), 2, chain(4)), prices)


def test_halves_are_joined_where_nobody_waits() -> None:
    prices = PipelinePrices((ChunkPrice(1, 1, 1, until_weight_gradient=1.0),) * 2)
    solved = solve_schedule(prices, (0, 0), 2, chain(2), (2.0,))
    assert not any(one.kind == "weight_gradient" for _, _, one in solved.schedule.actions())


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(InfeasibleError, match="rank 3 at least 1 bytes"):
        solve_schedule(uneven(3, 1, 1, 2), loop_placement(4, 1), 2, chain(4), (0.5,) * 4)


def test_prices_of_other_chunks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="3 chunks are priced"):
        solve_schedule(uneven(1, 1, 1), loop_placement(4, 1), 2, chain(4))


def every_schedule(placement: tuple[int, ...], edges: tuple[Edge, ...]) -> Iterator[Schedule]:
    """Every schedule of two microbatches with one chunk per rank, backward split or whole."""
    split, whole = ("forward", "input_gradient", "weight_gradient"), ("forward", "backward")
    orders = [
        [
            tuple(Action(kind, chunk, b) for b, kind in merged)  # type: ignore[arg-type]
            for first, second in itertools.product((split, whole), repeat=2)
            for merged in interleavings([(0, k) for k in first], [(1, k) for k in second])
        ]
        for chunk in range(len(placement))
    ]
    for ranks in itertools.product(*orders):
        try:
            yield complete("tried", ranks, placement, edges)
        except ScheduleError:
            continue


def interleavings(first: list[tuple[int, str]], second: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    if not first or not second:
        yield first + second
        return
    yield from ([first[0], *rest] for rest in interleavings(first[1:], second))
    yield from ([second[0], *rest] for rest in interleavings(first, second[1:]))


@pytest.mark.parametrize(
    "prices",
    [
        uneven(1, 2),
        uneven(2, 1, wire=3.0),
        PipelinePrices((ChunkPrice(1, 1, 2, backward=2.5, reduce=2.0), ChunkPrice(1, 2, 1, backward=2.0)), step=0.5),
        PipelinePrices(
            (ChunkPrice(1, 1, 1), ChunkPrice(0.3, 0.6, 0)), {(0, 1): EdgePrice(4, 1.0, 0.2, gradient_bytes=2)}
        ),
    ],
)
def test_two_ranks_and_two_microbatches_against_every_schedule(prices: PipelinePrices) -> None:
    solved = solve_schedule(prices, (0, 1), 2, chain(2))
    assert_holds(solved, prices)
    best = min(simulate(schedule, prices).seconds for schedule in every_schedule((0, 1), chain(2)))
    assert solved.bound <= best <= solved.seconds <= 1.05 * best
    if solved.status == "optimal":
        assert solved.seconds <= best * (1 + 2 * OPTIMAL)


times = st.floats(0.0, 4.0, allow_nan=False)
chunk_prices = st.builds(ChunkPrice, times, times, times, st.none() | times, times, until_input_gradient=times)
edge_prices = st.builds(EdgePrice, times, st.just(2.0), times, st.none() | times)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), placement=st.sampled_from([loop_placement(3, 1), v_placement(2), loop_placement(2, 2)]))
def test_the_bound_is_one_and_named_schedules_are_not_better(data: st.DataObject, placement: tuple[int, ...]) -> None:
    edges = chain(len(placement))
    prices = PipelinePrices(
        tuple(data.draw(chunk_prices) for _ in placement),
        {edge[:2]: data.draw(edge_prices) for edge in edges},
        step=data.draw(times),
        overlap=data.draw(st.booleans()),
        links={(0, 1): "shared", (1, 0): "shared"} if data.draw(st.booleans()) else {},
    )
    microbatches = data.draw(st.integers(1, 4))
    solved = solve_schedule(prices, placement, microbatches, edges, time_limit=0.1)
    assert_holds(solved, prices)
    named = [*named_schedules(placement, edges, microbatches, prices)]
    assert [s.name for s in named] == [name for name, _ in solved.named]
    assert all(solved.bound <= simulate(schedule, prices).seconds * (1 + 1e-9) for schedule in named)


def test_named_schedules_are_those_whose_chunks_lie_so() -> None:
    prices = uneven(1, 1, 1, 1)
    found = [s.name for s in named_schedules(v_placement(2), chain(4), 3, prices)]
    assert found == ["zb-v"]
    looped = [s.name for s in named_schedules(loop_placement(2, 2), chain(4), 3, prices)]
    assert looped == ["gpipe", "interleaved"]
    assert next(iter(named_schedules(v_placement(2), chain(4), 3, prices))) == make_schedule(
        "zb-v", 2, 3, 2, chain(4), prices.duration
    )


@pytest.mark.parametrize("amounts", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0)])
def test_every_kind_of_held_bytes_counts(amounts: tuple[float, float, float]) -> None:
    """Limits that no eager order keeps; the bound of less memory is not below that of more."""
    first, second, between = amounts
    chunks = tuple(
        ChunkPrice(t, t, t, until_input_gradient=first, until_weight_gradient=second, between_gradients=between)
        for t in (1.0, 2.0, 1.0)
    )
    prices = PipelinePrices(chunks)
    solved = solve_schedule(prices, loop_placement(3, 1), 5, chain(3), (sum(amounts),) * 3, time_limit=0.5)
    assert_holds(solved, prices)
    assert max(simulate(solved.schedule, prices).peak_bytes) <= sum(amounts)
    assert solved.bound >= solve_schedule(prices, loop_placement(3, 1), 5, chain(3)).bound * (1 - OPTIMAL)
