"""What the chunks of a pipeline rank hold together."""

from __future__ import annotations

import pytest

from autopar.schedule.messages import most_in_flight, most_in_flight_of_chunks
from autopar.schedule.named import make_schedule
from autopar.search.stage_prices.pipeline_breakdown import _counts_at_peak


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 4), ("zb-v", 2), ("gpipe", 2)])
def test_chunks_of_equal_size_hold_what_their_rank_has_in_flight(name: str, chunks: int) -> None:
    schedule = make_schedule(name, 4, 16, chunks)
    counts = dict(_counts_at_peak(schedule, [1] * schedule.chunks))
    for held, listed in zip(schedule.held, schedule.ranks, strict=True):
        assert sum(counts[chunk] for chunk in held) == most_in_flight(listed)


def test_a_large_chunk_counts_at_its_own_peak() -> None:
    schedule = make_schedule("interleaved", 4, 16, 4)
    most = most_in_flight_of_chunks(schedule.ranks, schedule.chunks)
    for chunk in range(schedule.chunks):
        saved = [10**6 if other == chunk else 1 for other in range(schedule.chunks)]
        assert dict(_counts_at_peak(schedule, saved))[chunk] == most[chunk]


def test_chunks_do_not_all_have_their_most_at_once() -> None:
    schedule = make_schedule("interleaved", 4, 16, 4)
    counts = dict(_counts_at_peak(schedule, [1] * schedule.chunks))
    most = most_in_flight_of_chunks(schedule.ranks, schedule.chunks)
    assert sum(counts[chunk] for chunk in schedule.held[0]) < sum(most[chunk] for chunk in schedule.held[0])
