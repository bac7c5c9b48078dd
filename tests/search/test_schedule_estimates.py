"""Schedules are tried in the order of their estimates, of which few are made, and none of many microbatches whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.cluster.description import Cluster
from autopar.cost.pipeline.simulate import simulate
from autopar.placement.memory_bound import held_bytes, saved_bytes
from autopar.planner.timings import Timings
from autopar.schedule.messages import most_in_flight_of_chunks
from autopar.schedule.named import make_schedule
from autopar.search import fitting_schedules, pipeline, rehearsed_memory, rounds
from autopar.search.best_plan import best_plan
from autopar.search.fitting_schedules import FittingSchedules, cut_and_price
from autopar.search.pipeline_predicted import rank_steps
from autopar.search.pipeline_request import schedule_choices
from autopar.search.pipeline_solution import PipelineSolution
from autopar.search.schedules import schedule_estimates
from autopar.search.schedules.cuts import Segments
from autopar.search.schedules.schedule_estimates import Arranged, Estimates, cuts_at, cuts_of, in_order
from autopar.search.segments import price_segments
from autopar.search.stage_prices.pipeline_breakdown import _counts_at_peak
from autopar.search.stage_problems import StagePrograms
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import Case
from tests.helpers.planning import Source, requested

Found = list[tuple[Arranged, tuple[str, ...]]]
ANYWHERE = np.full(16, -1, dtype=np.int64)


def arranged(kind: tuple[str, int], stages: int, microbatches: int) -> Arranged:
    return Arranged(kind, tuple(range(stages)), microbatches)


def unequal(count: int, seed: int = 0) -> Segments:
    draw = np.random.default_rng(seed)
    zero, starts = np.zeros(count), tuple(f"n{i}" for i in range(1, count))
    wire = np.concatenate([[0.0], draw.uniform(0.0, 0.1, count - 1)])
    return Segments(starts, draw.uniform(0.5, 1.5, count), zero, zero, wire)


def every(stages: int, microbatches: int, count: int) -> Found:
    """Every named schedule, each with equally many segments a chunk."""
    found = [arranged(kind, stages, microbatches) for kind in schedule_choices(stages, None)]
    chunks = [(each, stages * each.kind[1]) for each in found]
    return [(each, tuple(f"n{count * i // n}" for i in range(1, n))) for each, n in chunks if n <= count]


def estimates(count: int, stages: int, seed: int = 0) -> Estimates:
    return Estimates((unequal(count, seed),) * stages, None)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), max_size=12))
def test_the_order_is_that_of_sorting(drawn: list[tuple[float, float]]) -> None:
    items = list(enumerate(drawn))
    ordered = in_order(items, lambda item: item[1][0] * item[1][1], lambda item: item[1][0])
    assert list(ordered) == sorted(items, key=lambda item: item[1][0])


def test_what_cannot_come_first_is_not_estimated() -> None:
    made: list[float] = []

    def seconds(item: float) -> float:
        made.append(item)
        return item

    assert next(in_order([5.0, 1.0, 3.0], lambda item: 0.9 * item, seconds)) == 1.0
    assert made == [1.0]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 16), (8, 8)])
def test_schedules_come_in_the_order_of_their_simulated_seconds(stages: int, microbatches: int) -> None:
    found, by = every(stages, microbatches, 32), estimates(32, stages)
    seconds = {each.kind: simulate(each.shortened, by.prices(each, cuts)).seconds for each, cuts in found}
    assert all(by.bound(chosen) <= seconds[chosen[0].kind] * (1 + 1e-9) for chosen in found)
    assert [each.kind for each, _ in by.in_order(found)] == sorted(seconds, key=seconds.__getitem__)


@pytest.mark.parametrize("microbatches", [1, 9, 32])
def test_what_is_in_flight_is_that_of_the_schedule(microbatches: int) -> None:
    for stages in (2, 4):
        for name, chunks in schedule_choices(stages, None):
            made = make_schedule(name, stages, microbatches, chunks)
            expected = most_in_flight_of_chunks(made.ranks, made.chunks)
            assert arranged((name, chunks), stages, microbatches).in_flight == expected, name


@pytest.mark.parametrize("microbatches", [1, 9, 32])
def test_the_fullest_rank_holds_what_the_schedule_says(microbatches: int) -> None:
    """Chunks of one rank do not all hold most at the same time."""
    draw = np.random.default_rng(microbatches)
    sizes = {name: draw.uniform(0.0, 9.0, 32) for name in ("static", "working", "again")}
    segments = replace(unequal(32), saved=draw.uniform(0.0, 1.0, 32), **sizes)
    for each, cuts in every(4, microbatches, 32):
        schedule = make_schedule(each.kind[0], 4, microbatches, each.kind[1])
        ends = [0, *(int(name[1:]) for name in cuts), 32]
        saved = [float(segments.saved[a:b].sum()) for a, b in pairwise(ends)]
        held = [float(segments.static[a:b].sum()) for a, b in pairwise(ends)]
        counts = dict(_counts_at_peak(schedule, saved))
        needed = [float(segments.working[a:b].max() + segments.again[a:b].max()) for a, b in pairwise(ends)]
        most = [
            sum(held[c] + counts[c] * saved[c] for c in chunks) + max(needed[c] for c in chunks)
            for chunks in schedule.held
        ]
        limits = tuple(draw.uniform(5.0, 50.0, 4))
        expected = max(size / limit for size, limit in zip(most, limits, strict=True))
        assert Estimates((segments,) * 4, None).fullness((each, cuts), limits) == pytest.approx(expected), each.kind


@pytest.mark.parametrize("microbatches", [16, 64, 100])
def test_few_rounds_tell_how_long_all_take(monkeypatch: pytest.MonkeyPatch, microbatches: int) -> None:
    found, by = every(4, microbatches, 32), estimates(32, 4)
    whole = [by.seconds(chosen) for chosen in found]
    monkeypatch.setattr(schedule_estimates, "SIMULATED", 1)
    assert all(each.simulated < microbatches for each, _ in found)
    # Ranks of unequal chunks wait for each other by turns, which the busiest rank's seconds do not tell.
    assert [by.seconds(chosen) for chosen in found] == pytest.approx(whole, rel=0.03)


def test_stages_in_another_order_keep_their_chunks() -> None:
    each = arranged(("zb-v", 2), 3, 6)
    other = replace(each, order=(2, 0, 1))
    assert (each.placement, other.placement) == ((0, 1, 2, 2, 1, 0), (2, 0, 1, 1, 0, 2))
    assert other.shortened.placement == other.placement


@pytest.mark.parametrize(
    ("name", "recompute"), slow_rows_but([0], [("stack", "full"), ("llama", "full"), ("llama", None)])
)
def test_no_pipeline_holds_less_than_its_estimate(
    monkeypatch: pytest.MonkeyPatch, name: str, recompute: str | None
) -> None:
    estimated, peaks, price = list[float](), list[int](), fitting_schedules.cut_and_price

    def each_of(own: Estimates, found: Found) -> Iterator[tuple[Arranged, tuple[str, ...]]]:
        for each in found:
            estimated.append(own.fullness(each, (1.0, 1.0)))
            yield each

    def priced(*arguments: Any) -> PipelineSolution:
        solution = price(*arguments)
        peaks.append(max(solution.breakdown.peaks))
        return solution

    monkeypatch.setattr(Estimates, "in_order", each_of)
    monkeypatch.setattr(fitting_schedules, "cut_and_price", priced)
    monkeypatch.setattr(Estimates, "is_below", lambda *_: True)
    monkeypatch.setattr(rounds, "PRICED", 9)
    best_plan(requested(name, (2,), stages=2, microbatches=4, recompute=recompute), Timings())
    assert len(peaks) > 2 and all(0 < least <= peak for least, peak in zip(estimated, peaks, strict=True))


_LOCAL = Cluster.get("local")
WITH_HOST = replace(_LOCAL, device=replace(_LOCAL.device, host_bandwidth=4e9, host_memory_bytes=1 << 34))


class Frozen(nn.Module):
    """Layers of which the first has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def frozen() -> Case:
    return Frozen(), (torch.ones(8, 24),)


@pytest.mark.parametrize(
    ("source", "offload"),
    slow_rows_but([0, 1, 2], [("stack", None), (frozen, None), (frozen, "weights"), ("llama", None)]),
)
def test_no_chunk_holds_less_than_its_segments(monkeypatch: pytest.MonkeyPatch, source: Source, offload: Any) -> None:
    """Of parameters, and of what a microbatch saves, wherever the graph is cut."""
    priced, on_blocks, price = list[tuple[Segments, PipelineSolution]](), list[Segments](), price_segments

    def segments(*arguments: Any) -> Segments:
        on_blocks[:] = [price(*arguments)]
        return on_blocks[0]

    def every(own: Estimates, found: Found) -> Iterator[tuple[Arranged, tuple[str, ...]]]:
        kind = found[0][0]
        assert kind.kind == ("gpipe", 1)
        return ((kind, (name,)) for name in own.on_blocks[0].starts)

    def priced_at(*arguments: Any) -> PipelineSolution:
        priced.append((on_blocks[0], cut_and_price(*arguments)))
        return priced[-1][1]

    monkeypatch.setattr(fitting_schedules, "price_segments", segments)
    monkeypatch.setattr(Estimates, "in_order", every)
    monkeypatch.setattr(fitting_schedules, "cut_and_price", priced_at)
    monkeypatch.setattr(fitting_schedules, "fits", lambda *_: False)  # Other cuts are priced as well.
    monkeypatch.setattr(rounds, "PRICED", 99)
    options = {"stages": 2, "microbatches": 2, "schedule": "gpipe", "recompute": "none", "offload": offload}
    best_plan(requested(source, (2,), WITH_HOST, **options), Timings())
    assert len(priced) > 2
    for own, solution in priced:
        at = own.starts.index(solution.pipeline.cuts[0]) + 1
        if not any(node.phase == "backward" for node in solution.breakdown.chunks[0].graph.nodes):
            continue  # The gradient of its table belongs to the other chunk.
        for rank, (first, end) in enumerate(((0, at), (at, own.count))):
            (step,) = rank_steps(solution, rank, solution.prices[rank])
            parameters = step.graph.placeholders("param")
            assert own.static[first:end].sum() <= sum(sum(held_bytes(step, node)) for node in parameters)
            assert 0 <= own.bytes_of(first, end)[1] <= saved_bytes(step)
    assert own.saved.sum() > 0.0


@pytest.mark.parametrize("stages", [2, 4])
def test_where_a_quicker_schedule_does_not_fit_less_memory_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    limits, shares, solve = list[float](), [1.25], StagePrograms.solve

    def recorded(self: StagePrograms, graph: Any, repeats: Any, limit: float, host: float, *rest: float) -> Any:
        limits.append(limit)
        return solve(self, graph, repeats, limit, host, *rest)

    options = {"stages": stages, "microbatches": 4}
    monkeypatch.setattr(pipeline, "is_soon_rehearsed", lambda *_: False)
    alone = best_plan(requested("stack", (stages,), **options), Timings())
    monkeypatch.setattr(StagePrograms, "solve", recorded)
    monkeypatch.setattr(FittingSchedules, "fullness_of_quicker", lambda *_: shares.pop() if shares else None)
    again = best_plan(requested("stack", (stages,), **options), Timings())
    first, second = limits
    assert second <= 0.95 * first / 1.25
    assert again.predicted.step_seconds <= alone.predicted.step_seconds


def test_how_full_a_quicker_schedule_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuple(every(4, 8, 32))
    by, seconds = estimates(32, 4), [estimates(32, 4).seconds(chosen) for chosen in found]
    fullness = tuple(1.0 + 0.1 * position for position in range(len(found)))
    monkeypatch.setattr(fitting_schedules, "JUST_OVER", 9.0)
    tried = FittingSchedules(None, None, (), by, ANYWHERE, found, fullness, nearest=False)  # type: ignore[arg-type]
    quicker = [share for share, own in zip(fullness, seconds, strict=True) if share > 1.0 and own < seconds[0]]
    assert tried.fullness_of_quicker(seconds[0]) == min(quicker, default=None)
    assert tried.fullness_of_quicker(0.0) is None
    monkeypatch.setattr(fitting_schedules, "JUST_OVER", 1.0)
    assert tried.fullness_of_quicker(9.0) is None


def even(seconds: float, saved: float) -> Estimates:
    """Sixteen equal segments on two ranks."""
    one, none = np.ones(16), np.zeros(16)
    starts = tuple(f"n{i}" for i in range(1, 16))
    return Estimates((Segments(starts, seconds * one, one, saved * one, none),) * 2, None)


@dataclass
class Priced:
    """A solution whose ranks hold as much as its segments, times ``more`` on the first."""

    arranged: Arranged
    cuts: tuple[str, ...]
    more: float
    seconds: float = math.inf

    @property
    def breakdown(self) -> Any:
        at = int(self.cuts[0][1:])
        return SimpleNamespace(peaks=(int(1000 * self.more * 3 * at), 1000 * 3 * (16 - at)), host_bytes=0)

    @property
    def peaks(self) -> tuple[int, ...]:
        held: tuple[int, ...] = self.breakdown.peaks
        return held


def tried_with(
    monkeypatch: pytest.MonkeyPatch, more: float, *cuts: tuple[str, ...], limits: tuple[float, float] = (24e3, 24e3)
) -> list[tuple[str, ...]]:
    """The cuts that are priced, one after the other, of gpipe on two ranks with two microbatches."""
    monkeypatch.setattr(rehearsed_memory, "peaks_of", lambda own: own.peaks)
    monkeypatch.setattr(fitting_schedules, "cut_and_price", lambda _, __, cuts, one, *___: Priced(one, cuts, more))
    request = SimpleNamespace(limits=limits, host_limit=0, layout=None, cluster=None, aims=None)
    found, fullness = tuple((arranged(("gpipe", 1), 2, 2), each) for each in cuts), (1.0,) * len(cuts)
    tried = FittingSchedules(request, None, (), even(1.0, 1.0), ANYWHERE, found, fullness, nearest=False)  # type: ignore[arg-type]
    return [solution.cuts for solution in tried.solutions()]  # type: ignore[attr-defined]


def test_a_schedule_that_just_does_not_fit_is_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first rank holds 5% more than was estimated: one segment less fits, if the other rank can take it.
    assert tried_with(monkeypatch, 1.05, ("n8",), limits=(24e3, 30e3)) == [("n8",), ("n7",)]
    assert tried_with(monkeypatch, 1.05, ("n8",)) == [("n8",)]
    assert tried_with(monkeypatch, 1.05, ("n7",)) == [("n7",)]  # It fits.
    assert tried_with(monkeypatch, 1.2, ("n8",), limits=(24e3, 60e3)) == [("n8",)]  # It lacks too much.


def test_of_several_cuts_for_a_schedule_those_after_one_that_fits_are_not_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tried_with(monkeypatch, 1.0, ("n8",), ("n7",)) == [("n8",)]
    assert tried_with(monkeypatch, 2.0, ("n8",), ("n7",)) == [("n8",), ("n7",)]


@pytest.mark.parametrize(("seconds", "count"), [(math.inf, 2), (30.0, 1)])
def test_what_is_estimated_to_take_longer_than_one_that_fits_is_not_priced(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    monkeypatch.setattr(
        fitting_schedules, "cut_and_price", lambda _, __, cuts, one, *___: Priced(one, cuts, 1.0, seconds)
    )
    request = SimpleNamespace(limits=(24e3, 24e3), host_limit=0, layout=None, cluster=None, aims=None)
    found = tuple((arranged((name, 1), 2, 4), ("n8",)) for name in ("zb-h1", "gpipe"))
    by = even(1.0, 1.0)
    monkeypatch.setattr(rehearsed_memory, "peaks_of", lambda own: own.peaks)
    assert by.seconds(found[0]) < by.seconds(found[1]) and by.seconds(found[1]) > 30.0
    tried = FittingSchedules(request, None, (), by, ANYWHERE, found, (1.0, 1.0), nearest=False)  # type: ignore[arg-type]
    assert len(list(tried.solutions())) == count


@pytest.mark.parametrize("spare", [0.97, 0.99])
def test_chunks_of_a_rank_share_its_memory_as_is_best(spare: float) -> None:
    """Where the best cuts of all do not quite fit, others move as little as is needed."""
    own, kind = unequal(48), arranged(("zb-v", 2), 4, 16)
    own = replace(own, saved=own.seconds)
    by = Estimates((own,) * 4, None)
    freely = cuts_at(by.on_blocks, kind, np.full(48, -1), (math.inf,) * 4)
    assert freely is not None
    limits = (spare * by.fullness((kind, freely), (1.0,) * 4),) * 4
    found = list(cuts_of(by.on_blocks, kind, limits, np.full(48, -1)))
    fitting = [cuts for cuts in found if by.fullness((kind, cuts), limits) <= 1.0]
    equal = cuts_at(by.on_blocks, kind, np.full(48, -1), tuple(limit / 2 for limit in limits))
    assert freely in found and freely not in fitting and fitting
    quickest = min(by.seconds((kind, cuts)) for cuts in fitting)
    assert by.seconds((kind, freely)) <= quickest
    assert equal is None or quickest < by.seconds((kind, equal))
