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
    received: list[float] | None = None,
) -> Segments:
    count = len(seconds)
    zeros = np.zeros(count)
    return Segments(
        tuple(f"n{i}" for i in range(1, count)),
        np.array(seconds),
        zeros if static is None else np.array(static),
        zeros if saved is None else np.array(saved),
        zeros,
        entering=np.array([0.0, *(received or [])[1:]] if received else []),
        returning=np.array([0.0, *(received or [])[1:]][::-1] if received else []),
        working=np.array(working or []),
    )


def slowest(segments: Segments, cuts: tuple[str, ...], in_flight: tuple[int, ...], limit: float) -> float:
    edges = [0, *(int(cut[1:]) for cut in cuts), segments.count]
    worst = -np.inf
    for chunk, (start, end) in enumerate(pairwise(edges)):
        messages = segments.entering[start] + (segments.returning[end] if end < segments.count else 0.0)
        held = segments.static[start:end].sum() + in_flight[chunk] * (segments.saved[start:end].sum() + messages)
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
    segments = make(*(data.draw(numbers) for _ in range(5)))
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


def best_of_all(
    segments: list[Segments], in_flight: tuple[int, ...], limits: list[float], ranks: list[int], allowed: list[int]
) -> tuple[str, ...] | None:
    """The cuts by dynamic programming over chunks of every length, the first of equally good ones."""
    count = segments[0].count
    best: list[tuple[float, tuple[int, ...]]] = [(-np.inf, ())] + [(np.inf, ())] * count
    for chunk, own in enumerate(segments):
        total, wire = np.concatenate([[0.0], np.cumsum(own.seconds)]), [*own.wire, 0.0]
        found: list[tuple[float, tuple[int, ...]]] = [(np.inf, ())]
        for end in range(1, count + 1):
            ways = []
            for start in range(end):
                static, saved, running = own.bytes_of(start, end)
                fits = static + in_flight[chunk] * saved + running <= limits[chunk]
                fits &= all(rank in (-1, ranks[chunk]) for rank in allowed[start:end])
                taken = max(total[end] - total[start], wire[start]) + 0.5 * (wire[start] + wire[end])
                ways.append((max(best[start][0], taken if fits else np.inf), (*best[start][1], start)))
            found.append(min(ways, key=lambda way: way[0]))
        best = found
    slowest, starts = best[count]
    return None if slowest == np.inf else tuple(segments[0].starts[start - 1] for start in starts[1:])


@pytest.mark.parametrize("seed", range(40))
def test_long_chunks_that_are_not_tried_change_nothing(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, chunks = int(draw.integers(20, 41)), int(draw.integers(1, 12))
    turn, levels = int(draw.integers(1, 8)), [0.0, 1.0, 2.0, 50.0][: int(draw.integers(2, 5))]
    layers = np.resize(draw.choice(levels, turn), count)  # Of equal layers, many cuts are equally good.
    layers[draw.integers(count)] += draw.choice([0.0, 300.0])
    made = [
        replace(
            make(list(part * layers), *(list(draw.integers(0, 9, count).astype(float)) for _ in range(3))),
            wire=np.concatenate([[0.0], draw.choice([0.0, 0.0, 1.0], count - 1)]),
        )
        for part in (1.0, float(draw.choice([1.0, 3.0])))
    ]
    segments = [made[chunk % 2] for chunk in range(chunks)]
    limits, in_flight = list(draw.choice([200.0, 500.0, np.inf], chunks)), tuple(range(chunks, 0, -1))
    ranks, allowed = [chunk % 3 for chunk in range(chunks)], [-1] * count
    if seed % 4 == 0:
        allowed[int(draw.integers(count))] = int(draw.integers(3))
    found = best_cuts(segments, in_flight, limits, np.array(ranks), np.array(allowed))
    assert found == best_of_all(segments, in_flight, limits, ranks, allowed)
