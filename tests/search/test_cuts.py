"""Cuts by dynamic programming against all cuts there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.schedules.cuts import Segments, best_cuts


def make(
    seconds: list[float],
    static: list[float] | None = None,
    saved: list[float] | None = None,
    working: list[float] | None = None,
) -> Segments:
    count = len(seconds)
    zeros = np.zeros(count)
    return Segments(
        tuple(f"n{i}" for i in range(1, count)),
        np.array(seconds),
        zeros if static is None else np.array(static),
        zeros if saved is None else np.array(saved),
        zeros,
        np.array(working or []),
    )


def slowest(segments: Segments, cuts: tuple[str, ...], in_flight: tuple[int, ...], limit: float) -> float:
    edges = [0, *(int(cut[1:]) for cut in cuts), segments.count]
    worst = -np.inf
    for chunk, (start, end) in enumerate(pairwise(edges)):
        held = segments.static[start:end].sum() + in_flight[chunk] * segments.saved[start:end].sum()
        held += segments.working[start:end].max(initial=0.0)
        if held > limit:
            return np.inf
        worst = max(worst, float(segments.seconds[start:end].sum()), float(segments.wire[start]))
    return worst


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_cut_is_better(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 7))
    numbers = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    segments = make(*(data.draw(numbers) for _ in range(4)))
    chunks = data.draw(st.integers(1, 4))
    in_flight = tuple(range(chunks, 0, -1))
    limit = float(data.draw(st.integers(5, 60)))
    found = best_cuts([segments] * chunks, in_flight, [limit] * chunks)
    ways = combinations(segments.starts, chunks - 1)
    least = min((slowest(segments, way, in_flight, limit) for way in ways), default=np.inf)
    if found is None:
        assert least == np.inf
    else:
        assert slowest(segments, found, in_flight, limit) == least


def test_a_heavy_head_gets_a_stage_of_its_own() -> None:
    assert best_cuts([make([1, 1, 1, 1, 4])] * 2, (1, 1), [np.inf] * 2) == ("n4",)


def test_chunks_of_a_rank_share_the_bytes_in_which_one_runs() -> None:
    segments = make([1, 1], static=[4, 4], working=[6, 6])
    assert best_cuts([segments] * 2, (1, 1), [7.0] * 2) is None
    assert best_cuts([segments] * 2, (1, 1), [7.0] * 2, sharing=2) == ("n1",)


def test_a_slow_wire_moves_the_cut() -> None:
    segments = make([1, 1, 1, 1])
    segments.wire[2] = 9.0
    assert best_cuts([segments] * 2, (1, 1), [np.inf] * 2) in (("n1",), ("n3",))


def test_more_chunks_than_segments_is_no_cut() -> None:
    assert best_cuts([make([1, 1])] * 3, (1, 1, 1), [np.inf] * 3) is None


@pytest.mark.parametrize(("rank", "cut"), [(0, "n3"), (1, "n1")])
def test_a_pinned_segment_lies_on_its_rank(rank: int, cut: str) -> None:
    allowed = np.array([-1, 0 if rank == 0 else 1, 0 if rank == 0 else 1, -1])
    assert best_cuts([make([1, 1, 1, 1])] * 2, (1, 1), [np.inf] * 2, np.array([0, 1]), allowed) == (cut,)


def test_of_cuts_that_balance_as_well_those_are_taken_that_fewer_bytes_cross() -> None:
    segments = replace(make([1.0, 0.0, 0.0, 1.0]), wire=np.array([0.0, 0.3, 0.1, 0.3]))
    assert best_cuts([segments] * 2, (1, 1), [1.0] * 2) == ("n2",)
    # Unless the computation that it leaves to one chunk takes longer than the messages.
    uneven = replace(segments, seconds=np.array([1.0, 0.5, 0.0, 1.5]))
    assert best_cuts([uneven] * 2, (1, 1), [1.0] * 2) == ("n2",)
    assert best_cuts([replace(uneven, wire=np.array([0.0, 0.3, 0.9, 0.3]))] * 2, (1, 1), [1.0] * 2) == ("n3",)
