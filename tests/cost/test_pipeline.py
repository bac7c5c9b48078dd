"""The pipeline simulator: published bubbles exactly, transfers and memory by hand, bounds below, traces that parse."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost import ChunkPrice, EdgePrice, PipelinePrices, Simulation, bubble_fraction, simulate, step_lower_bound
from autopar.cost.pipeline.prices import SharedProcessors
from autopar.errors import ScheduleError
from autopar.schedule.actions import Edge
from autopar.schedule.messages import forward_only
from autopar.schedule.named import make_schedule
from autopar.schedule.schedule import Schedule, chain
from tests.helpers.chrome_trace import timeline_from_chrome_trace

UNIT = ChunkPrice(1.0, 1.0, 1.0, until_weight_gradient=1.0)
NAMED = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]


def equal(schedule: Schedule, price: ChunkPrice = UNIT) -> PipelinePrices:
    return PipelinePrices((price,) * schedule.chunks)


def run(name: str, stages: int, microbatches: int, chunks: int | None = None, price: ChunkPrice = UNIT) -> Simulation:
    schedule = make_schedule(name, stages, microbatches, chunks)
    return simulate(schedule, equal(schedule, price))


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("extra", [0, 1, 5, 12])
def test_published_bubbles_exactly(stages: int, extra: int) -> None:
    """Durations are binary fractions, so sums are exact."""
    uneven = ChunkPrice(1.0, 1.5, 0.5)
    m = stages + extra
    assert run("gpipe", stages, m, price=uneven).bubble == (stages - 1) / m
    assert run("1f1b", stages, m, price=uneven).bubble == (stages - 1) / m
    for chunks in (2, 3):
        simulation = run("interleaved", stages, m, chunks, uneven)
        assert simulation.computed - sum(simulation.busy) / stages == (stages - 1) * 3.0
        assert simulation.bubble == pytest.approx((stages - 1) / (m * chunks), rel=1e-12)
    zero = run("zb-h1", stages, m, price=uneven)
    assert zero.computed - sum(zero.busy) / stages == (stages - 1) * (1.0 + 1.5 - 0.5)
    v = run("zb-v", stages, m + stages)
    assert v.computed - sum(v.busy) / stages == stages - 1
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
        assert run(name, stages, m, chunks).bubble == pytest.approx(bubble_fraction(name, stages, m, chunks), rel=1e-12)
    assert v.bubble == pytest.approx(bubble_fraction("zb-v", stages, m + stages, 2), rel=1e-12)


def test_receiving_passes_while_its_rank_waits() -> None:
    """Two stages, messages of half a second for which both ends stand still. Forward 0 comes into the second stage
    while that waits (until 1.5), forward 1 is there when its turn comes at 4: half a second more. Both gradients come
    into the first stage while that waits (3 to 4, 5 to 7)."""
    first = ChunkPrice(1.5, 0.75, 0.75, receive_backward=0.5)
    second = ChunkPrice(1.5, 0.75, 0.75, receive_forward=0.5)
    assert simulate(make_schedule("1f1b", 2, 2), PipelinePrices((first, second))).seconds == 8.0
    both = PipelinePrices(tuple(replace(one, receive_forward=0.0, receive_backward=0.0) for one in (first, second)))
    assert simulate(make_schedule("1f1b", 2, 2), both).seconds == 9.0


def test_reductions_beside_computing() -> None:
    """Of two chunks on a rank the one that is done first is reduced while the other computes; where messages hide
    behind nothing, the rank waits."""
    price = ChunkPrice(1.0, 1.0, 1.0, reduce=4.0)
    schedule = make_schedule("gpipe", 1, 3, 2, edges=chain(2))
    beside, instead = (simulate(schedule, PipelinePrices((price,) * 2, step=1.0, hides=h)) for h in (True, False))
    computing = 2 * 3 * 3.0
    # Chunk 1 is reduced while chunk 0 computes its last 6 seconds; chunk 0 has nothing left to hide behind.
    assert beside.seconds == computing + 4.0 + 1.0
    assert instead.seconds == computing + 2 * 4.0 + 1.0
    longer = ChunkPrice(1.0, 1.0, 1.0, reduce=7.0)
    assert simulate(schedule, PipelinePrices((longer,) * 2, step=1.0)).seconds == computing - 6.0 + 2 * 7.0 + 1.0


def test_reductions_begin_within_the_last_backward() -> None:
    """As far as the link is free: what travels beside a backward is of its own chunk only once the one before is done.
    A backward in halves hides what its second half does."""
    price = ChunkPrice(1.0, 1.0, 1.0, reduce=4.0, overlap_weight_gradient=0.5, overlap_backward=1.5)
    schedule = make_schedule("gpipe", 1, 3, 2, edges=chain(2))
    beside, instead = (simulate(schedule, PipelinePrices((price,) * 2, step=1.0, hides=h)) for h in (True, False))
    assert beside.seconds == 18.0 - 1.5 + 4.0 + 1.0
    assert instead.seconds == 18.0 + 2 * 4.0 + 1.0
    longer = replace(price, reduce=7.0)
    # Chunk 1 is reduced from 10.5 to 17.5, in the middle of the last backward of chunk 0.
    assert simulate(schedule, PipelinePrices((longer,) * 2, step=1.0)).seconds == 12.0 - 1.5 + 2 * 7.0 + 1.0
    halves = make_schedule("zb-h1", 1, 2)
    assert simulate(halves, PipelinePrices((price,), step=1.0)).seconds == 6.0 - 0.5 + 4.0 + 1.0
    with pytest.raises(ScheduleError, match="its reduction overlaps more than its last backward takes"):
        simulate(halves, PipelinePrices((replace(price, overlap_weight_gradient=1.5),)))


def test_messages_that_processors_carry_take_of_their_time() -> None:
    schedule = make_schedule("gpipe", 2, 1, 1, edges=chain(2))
    edges = {(0, 1): EdgePrice(4.0, 2.0, 0.5)}
    beside, instead = (simulate(schedule, PipelinePrices((UNIT,) * 2, edges, hides=h)) for h in (True, False))
    assert beside.seconds == 1 + 2.5 + 1 + 2 + 2.5 + 2
    # Half of each message's 2.5 seconds at each of its ends.
    assert instead.seconds == beside.seconds + 4 * 1.25


def test_what_is_not_awaited_travels_beside_a_backward_with_more_to_do_after_it() -> None:
    """The gradient that the other rank waits for leaves when backward ends, with few reductions under way by then."""
    price = ChunkPrice(1.0, 1.0, 1.0, reduce=6.0, overlap_backward=2.0, unawaited=0.5)
    schedule = make_schedule("1f1b", 2, 1)
    assert (schedule.ends_with(0), schedule.ends_with(1)) == (True, False)
    ran = simulate(schedule, PipelinePrices((price,) * 2)).record.ran
    backward, reduced = ({one.rank: one for one in ran if one.action.kind == k} for k in ("backward", "reduce"))
    assert (backward[1].end, reduced[1].start) == (4.0, 4.0 - 0.5)
    assert (backward[0].end, reduced[0].start) == (6.0, 6.0 - 2.0)


def test_a_reduction_before_any_backward_travels_beside_nothing() -> None:
    schedule = make_schedule("1f1b", 1, 1)
    (listed,) = schedule.ranks
    ranks = (tuple(sorted(listed, key=lambda one: one.kind != "reduce")),)
    assert ranks[0][0].kind == "reduce"
    price = ChunkPrice(1.0, 1.0, 1.0, reduce=6.0, overlap_backward=2.0)
    assert simulate(replace(schedule, ranks=ranks), PipelinePrices((price,))).seconds == 6.0


def test_larger_microbatches_of_the_same_batch_grow_the_bubble() -> None:
    """A batch of 16 samples in 16, 8 and 4 microbatches, each sample a second of forward."""
    bubbles = [run("1f1b", 4, 16 // size, price=ChunkPrice(size, size, size)).bubble for size in (1, 2, 4)]
    assert bubbles == sorted(bubbles)
    assert bubbles[2] == 4 * bubbles[0]


def test_no_closed_form_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="no closed form for 'interleaved' with 4 stages, 3 microbatches, 2 chunks"):
        bubble_fraction("interleaved", 4, 3, 2)


def prices(schedule: Schedule, **changes: object) -> PipelinePrices:
    edges = {(edge.source, edge.target): EdgePrice(nbytes=4.0, bandwidth=8.0, latency=0.25) for edge in schedule.edges}
    return PipelinePrices((UNIT,) * schedule.chunks, edges, **changes)  # type: ignore[arg-type]


def test_a_transfer_delays_its_consumer_and_takes_its_link() -> None:
    """One microbatch, two ranks: forward, transfer 0.75, forward, backward, transfer back, backward."""
    schedule = make_schedule("1f1b", 2, 1)
    simulation = simulate(schedule, prices(schedule))
    assert simulation.seconds == 1 + 0.75 + 1 + 2 + 0.75 + 2
    spans = {span.name: (span.start, span.end) for span in simulation.timeline.spans}
    assert spans["SF0>1.0"] == (1.0, 1.75)
    assert spans["F1.0"] == (1.75, 2.75)


def test_messages_share_a_link_one_at_a_time() -> None:
    """Ranks 0 and 1 both send to rank 2 when they have computed; a shared link carries one after the other."""
    text_edges = (Edge(0, 2), Edge(1, 2))
    schedule = make_schedule("1f1b", 3, 1, edges=text_edges)
    apart = simulate(schedule, prices(schedule))
    shared = simulate(schedule, prices(schedule, links={(0, 2): "uplink", (1, 2): "uplink"}))
    arrives = [span for span in shared.timeline.spans if span.kind == "send_forward"]
    assert [(span.start, span.end) for span in arrives] == [(1.0, 1.75), (1.5, 2.25)]
    assert shared.seconds == apart.seconds + 0.5


def test_transfers_hide_behind_computing_only_with_overlap() -> None:
    early = make_schedule("1f1b", 4, 12)
    late = make_schedule("1f1b", 4, 12, prefetch=False)
    hidden = simulate(early, prices(early)).seconds
    assert hidden < simulate(late, prices(late)).seconds
    assert hidden < simulate(late, prices(late, overlap=False)).seconds
    assert simulate(late, prices(late, buffered=True)).seconds <= hidden


def test_reductions_overlap_and_the_step_waits_for_them() -> None:
    schedule = make_schedule("1f1b", 1, 2)
    one = ChunkPrice(1.0, 1.0, 1.0, reduce=5.0)
    assert simulate(schedule, PipelinePrices((one,), step=0.5)).seconds == 6 + 5 + 0.5
    two = make_schedule("gpipe", 1, 1, 2)
    overlapped = simulate(two, PipelinePrices((one, one)))
    assert overlapped.seconds == 2 + 2 + 5 + 5  # the second reduction follows the first, which hides two seconds
    assert simulate(two, PipelinePrices((one, one), overlap=False)).seconds == 6 + 5 + 5


def test_ranks_that_share_processors_are_quicker_while_others_wait() -> None:
    """Two ranks on one core: each alone is twice as quick as priced. One microbatch, so that they take turns."""
    shared = SharedProcessors((0, 0), (2.0, 1.0))
    turns = make_schedule("1f1b", 2, 1)
    simulation = simulate(turns, PipelinePrices((UNIT,) * 2, step=1.0, shared=shared))
    assert simulation.seconds == 6 / 2 + 1  # the step is made by both at once, but for what the second begins before
    spans = {span.name: (span.start, span.end) for span in simulation.timeline.spans if span.kind != "step"}
    assert spans["F0.0"] == (0.0, 0.5) and spans["F1.0"] == (0.5, 1.0)


def test_a_rank_of_several_devices_counts_as_so_many() -> None:
    """One device and three, on one core: the first alone has all of it, the three alone a third each."""
    shared = SharedProcessors((0, 0), (4.0, 2.0, 4 / 3, 1.0), (1, 3))
    prices = PipelinePrices((UNIT,) * 2, shared=shared)
    spans = {s.name: (s.start, s.end) for s in simulate(make_schedule("1f1b", 2, 1), prices).timeline.spans}
    assert spans["F0.0"] == (0.0, 0.25) and spans["F1.0"] == (0.25, 1.0)
    assert prices.quickest == 4.0
    assert replace(prices, shared=replace(shared, devices=(2, 3))).quickest == 2.0


def test_processors_are_shared_among_those_that_compute() -> None:
    """Rank 1 begins when rank 0 is through with its first forward; from then on both compute, each at the price."""
    shared = SharedProcessors((0, 0), (2.0, 1.0))
    schedule = forward_only(make_schedule("1f1b", 2, 3))
    simulation = simulate(schedule, PipelinePrices((UNIT,) * 2, shared=shared))
    spans = {span.name: (span.start, span.end) for span in simulation.timeline.spans}
    assert spans["F0.0"] == (0.0, 0.5)
    assert spans["F0.1"] == spans["F1.0"] == (0.5, 1.5)
    assert spans["F0.2"] == spans["F1.1"] == (1.5, 2.5)
    assert spans["F1.2"] == (2.5, 3.0)


@given(st.sampled_from(NAMED), st.integers(2, 4), st.integers(1, 6), st.floats(1.0, 4.0))
@settings(max_examples=50)
def test_sharing_never_does_more_than_the_processors_can(
    named: tuple[str, int], stages: int, microbatches: int, most: float
) -> None:
    schedule = make_schedule(named[0], stages, microbatches, named[1])
    speeds = tuple(min(most, stages / k) for k in range(1, stages + 1))
    shared = simulate(
        schedule, PipelinePrices((UNIT,) * schedule.chunks, shared=SharedProcessors((0,) * stages, speeds))
    )
    apart = simulate(schedule, equal(schedule))
    work = 3.0 * microbatches * schedule.chunks / stages
    assert max(work, apart.seconds / most) - 1e-9 <= shared.seconds <= apart.seconds + 1e-9


def test_memory_by_hand() -> None:
    """Held from forward to I and W; between I and W; static; buffers at both ends of a message."""
    schedule = make_schedule("zb-h1", 1, 1)
    price = ChunkPrice(
        1.0, 1.0, 1.0, 0, 0.0, until_input_gradient=3, until_weight_gradient=5, between_gradients=7, static=10
    )
    assert simulate(schedule, PipelinePrices((price,))).memory == (((0, 18), (1, 25), (2, 22), (3, 10)),)
    two = make_schedule("1f1b", 2, 1)
    simulation = simulate(two, PipelinePrices((ChunkPrice(1.0, 1.0, 1.0),) * 2, {(0, 1): EdgePrice(4.0, 4.0)}))
    assert simulation.memory[0] == ((0.0, 0.0), (1.0, 8.0), (2.0, 4.0), (6.0, 0.0)), simulation.memory[0]
    assert simulation.memory[1] == ((0.0, 4.0), (2.0, 0.0), (5.0, 4.0), (6.0, 0.0))


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
def test_the_peak_is_what_was_promised_in_flight(name: str, chunks: int) -> None:
    for stages, microbatches in ((2, 5), (4, 3), (4, 9), (3, 8)):
        schedule = make_schedule(name, stages, microbatches, chunks)
        assert simulate(schedule, equal(schedule)).peak_bytes == schedule.in_flight


SECONDS = st.sampled_from((0.0, 0.25, 1.0, 1.5, 4.0))


@given(st.sampled_from(NAMED), st.integers(1, 4), st.integers(1, 9), st.data())
@settings(max_examples=100)
def test_no_schedule_beats_the_bound_and_no_rank_does_two_things(
    named: tuple[str, int], stages: int, microbatches: int, data: st.DataObject
) -> None:
    chunks = stages * named[1]
    edges = chain(chunks) + ((Edge(0, chunks - 1, False),) if chunks > 2 else ())
    schedule = make_schedule(named[0], stages, microbatches, named[1], edges)
    share = data.draw(st.sampled_from((0.0, 0.5, 1.0)))
    drawn = [[data.draw(SECONDS) for _ in range(3)] for _ in range(chunks)]
    priced = tuple(ChunkPrice(*d, receive_forward=share * d[0], receive_backward=share * d[1]) for d in drawn)
    moved = {edge[:2]: EdgePrice(data.draw(SECONDS), 1.0, data.draw(SECONDS)) for edge in edges}
    overlap, buffered = data.draw(st.booleans()), data.draw(st.booleans())
    pipeline = PipelinePrices(priced, moved, step=0.5, overlap=overlap, buffered=buffered)
    simulation = simulate(schedule, pipeline)
    in_halves = any(one.kind == "weight_gradient" for _, _, one in schedule.actions())
    bound = step_lower_bound(pipeline, schedule.placement, edges, microbatches, in_halves)
    assert bound <= simulation.seconds + 1e-9
    ended = [0.0] * stages
    for span in simulation.timeline.spans:
        if span.lane == "compute":
            assert span.start >= ended[span.rank] - 1e-12
            ended[span.rank] = span.end
    assert all(abs(rank[-1][1]) < 1e-9 for rank in simulation.memory)


def test_the_bound_is_met_by_1f1b_with_equal_stages() -> None:
    schedule = make_schedule("1f1b", 4, 8)
    bound = step_lower_bound(equal(schedule), schedule.placement, schedule.edges, 8, split=False)
    assert bound == simulate(schedule, equal(schedule)).seconds


def test_evaluation_holds_nothing_afterwards() -> None:
    schedule = forward_only(make_schedule("1f1b", 3, 4))
    simulation = simulate(schedule, equal(schedule))
    assert simulation.seconds == 3 + 4 - 1
    assert simulation.peak_bytes == (1.0, 1.0, 1.0)


def test_the_timeline_is_a_chrome_trace() -> None:
    schedule = make_schedule("zb-v", 2, 3)
    timeline = simulate(schedule, prices(schedule)).timeline
    data = json.loads(json.dumps(timeline.to_chrome_trace()))
    assert {event["ph"] for event in data["traceEvents"]} == {"M", "X", "C"}
    computed = [event for event in data["traceEvents"] if event.get("cat") == "forward"]
    assert len(computed) == 4 * 3 and all(event["dur"] == 1e6 for event in computed)
    assert timeline_from_chrome_trace(data) == timeline
    assert timeline.idle_fraction == pytest.approx(1 - sum(map(timeline.busy, (0, 1))) / (2 * timeline.seconds))


def test_prices_of_other_chunks_are_refused() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="1 chunks are priced, the schedule has 2"):
        simulate(schedule, PipelinePrices((UNIT,)))
    with pytest.raises(ScheduleError, match="chunk 1 takes negative time"):
        simulate(schedule, PipelinePrices((UNIT, ChunkPrice(1.0, -1.0, 1.0))))
    with pytest.raises(ScheduleError, match="chunk 0 receives longer"):
        simulate(schedule, PipelinePrices((replace(UNIT, receive_backward=1.5), UNIT)))


def test_a_list_that_stops_is_an_error() -> None:
    schedule = make_schedule("1f1b", 2, 1)
    cut = replace(schedule, ranks=(schedule.ranks[0], schedule.ranks[1][:1]))
    with pytest.raises(ScheduleError, match=r"rank 0 never gets past position 3, B0.0: check the schedule first"):
        simulate(cut, equal(cut))


def test_a_large_schedule_is_simulated_quickly() -> None:
    schedule = make_schedule("interleaved", 16, 128, 4)
    started = time.process_time()
    assert simulate(schedule, equal(schedule)).bubble == pytest.approx(15 / 512)
    assert time.process_time() - started < 1.0
