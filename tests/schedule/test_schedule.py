"""Pipeline schedules: vocabulary, the named generators, text forms, and the checker held against an interpreter."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule.actions import COMPUTE, Action, Edge
from autopar.schedule.check import Communication, check
from autopar.schedule.messages import complete, forward_only, most_in_flight
from autopar.schedule.named import SCHEDULES, chunks_allowed, make_schedule
from autopar.schedule.schedule import Schedule, chain, loop_placement, v_placement
from autopar.schedule.text import parse_action
from tests.helpers.schedule_machine import Broken, Machine

COMMUNICATIONS: tuple[Communication, ...] = ("asynchronous", "batched", "blocking")


@st.composite
def schedules(draw: st.DrawFn, most: int = 5) -> Schedule:
    """Any named schedule, with random direct edges besides the chain, and random costs where messages are placed."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    least, largest = chunks_allowed(name)
    stages, microbatches = draw(st.integers(1, most)), draw(st.integers(1, 2 * most + 1))
    chunks = draw(st.integers(least, largest or 3))
    pairs = [(a, b) for b in range(stages * chunks) for a in range(b)]
    extra = draw(st.lists(st.sampled_from(pairs), max_size=4, unique=True)) if pairs else []
    edges = {edge[:2]: edge for edge in chain(stages * chunks)}
    edges |= {pair: Edge(*pair, draw(st.booleans())) for pair in extra if pair not in edges}
    seed = draw(st.integers(0, 99))
    costs = [random.Random(seed).choice((0.0, 0.5, 1.0, 3.0)) for _ in range(7)]
    return make_schedule(
        name,
        stages,
        microbatches,
        chunks,
        tuple(edges.values()),
        lambda i: costs[(COMPUTE.index(i.kind) + 3 * i.chunk) % 7],
    )


def verdict(schedule: Schedule, communication: Communication) -> str:
    try:
        check(schedule, communication)
    except ScheduleError as error:
        return str(error)
    return ""


def runs(schedule: Schedule, blocking: bool) -> bool:
    try:
        for seed in range(3):
            Machine(schedule, seed, blocking).run()
    except Broken:
        return False
    return True


@given(schedules())
@settings(max_examples=60)
def test_named_schedules_run_under_every_rule(schedule: Schedule) -> None:
    for communication in COMMUNICATIONS:
        check(schedule, communication)
    assert runs(schedule, blocking=False)
    assert runs(schedule, blocking=True)
    assert tuple(map(most_in_flight, schedule.ranks)) == schedule.in_flight


@given(schedules(), st.randoms(use_true_random=False), st.integers(1, 2))
@settings(max_examples=200)
def test_the_checker_rejects_exactly_what_breaks(schedule: Schedule, rng: random.Random, times: int) -> None:
    """Lists changed at random: accepted if and only if the interpreter computes the step."""
    broken = schedule
    for _ in range(times):
        broken = mutate(broken, rng)
    assert (verdict(broken, "asynchronous") == "") == runs(broken, blocking=False)
    assert (verdict(broken, "blocking") == "") == runs(broken, blocking=True)


def mutate(schedule: Schedule, rng: random.Random) -> Schedule:
    """One action dropped, duplicated, moved, exchanged with another, sent elsewhere, or of another kind."""
    ranks = [list(listed) for listed in schedule.ranks]
    rank = rng.randrange(schedule.stages)
    if not ranks[rank]:
        return schedule
    listed, at, other = ranks[rank], rng.randrange(len(ranks[rank])), rng.randrange(len(ranks[rank]))
    change = rng.choice(("drop", "duplicate", "swap", "neighbours", "move", "rank", "retarget", "kind", "promise"))
    if change == "drop":
        del listed[at]
    elif change == "duplicate":
        listed.insert(other, listed[at])
    elif change == "swap":
        listed[at], listed[other] = listed[other], listed[at]
    elif change == "neighbours" and at:
        listed[at - 1], listed[at] = listed[at], listed[at - 1]
    elif change == "move":
        listed.insert(other, listed.pop(at))
    elif change == "rank":
        ranks[rng.randrange(schedule.stages)].append(listed.pop(at))
    elif change == "retarget":
        field = rng.choice(("chunk", "microbatch", "peer"))
        if listed[at].kind not in ("reduce", "step") and (field != "peer" or listed[at].peer >= 0):
            listed[at] = replace(listed[at], **{field: rng.randrange(-1, schedule.chunks + 1)})
    elif change == "kind" and listed[at].computes:
        listed[at] = replace(listed[at], kind=rng.choice(("forward", "input_gradient", "weight_gradient", "backward")))
    elif change == "promise":
        fewer = [max(0, n - (r == rank)) for r, n in enumerate(schedule.in_flight)]
        return replace(schedule, in_flight=tuple(fewer))
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


TINY = make_schedule("1f1b", 2, 2, prefetch=False)
REJECTED = {
    "a forward dropped": ("F1.1 ", "", "rank 1: F1.1 is missing"),
    "a send dropped": ("SB1>0.1", "", "rank 1: SB1>0.1 is missing"),
    "a send twice": ("SB1>0.1", "SB1>0.1 SB1>0.1", "SB1>0.1: is on this list a second time"),
    "backward before forward": ("F1.1 B1.1", "B1.1 F1.1", "B1.1: comes before F1.1"),
    "used before received": ("RF0>1.0 F1.0", "F1.0 RF0>1.0", "rank 1, position 0, F1.0: comes before RF0>1.0"),
    "sent before computed": ("B1.0 SB1>0.0", "SB1>0.0 B1.0", "SB1>0.0: comes before B1.0"),
    "an edge that is not there": ("SF0>1.1", "SB0>1.1", "no edge carries a gradient from 0 to 1"),
    "a chunk of another rank": ("F0.1", "F1.1", "rank 0 holds chunks (0,), not 1"),
    "a microbatch too many": ("F0.1", "F0.2", "there are microbatches 0 to 1"),
    "no step": ("reduce0 step", "reduce0", "rank 0: step is missing"),
    "reduced too early": ("B1.1 SB1>0.1 reduce1", "reduce1 B1.1 SB1>0.1", "reduce1: comes before B1.1"),
    "more in flight than promised": ("in_flight 2 1", "in_flight 1 1", "2 in flight, 1 promised"),
    "half a backward": ("B0.1", "I0.1", "rank 0: W0.1 is missing"),
    "backward whole and in halves": ("B0.1", "B0.1 I0.1", "B0.1 is listed whole, and I0.1 a second time"),
    "something after the step": ("reduce0 step", "step reduce0", "the step comes last"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_rejection_names_rank_position_and_action(case: str) -> None:
    before, after, message = REJECTED[case]
    text = str(TINY)
    assert text.count(before) == 1
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.from_text(text.replace(before, after)))
    assert message in str(caught.value)


def test_messages_in_another_order_than_sent_are_rejected() -> None:
    text = str(make_schedule("gpipe", 2, 2, prefetch=False))
    with pytest.raises(
        ScheduleError, match=r"rank 1, position 0, RF0>1.1: would receive what rank 0, position 1, SF0>1.0"
    ):
        check(
            Schedule.from_text(text.replace("RF0>1.0 F1.0 RF0>1.1 F1.1", "RF0>1.1 RF0>1.0 F1.0 F1.1")), "asynchronous"
        )


def test_crossed_messages_need_a_batch_and_crossed_values_deadlock() -> None:
    """Two ranks that both send first pass batched, not one by one; two that both wait for the other never do."""
    crossed = """\
schedule crossed microbatches=1 training
placement 0 1 0 1
edges 0>3! 1>2!
in_flight 2 2
rank 0: F0.0 SF0>3.0 RF1>2.0 F2.0 B0.0 B2.0 reduce0 reduce2 step
rank 1: F1.0 SF1>2.0 RF0>3.0 F3.0 B1.0 B3.0 reduce1 reduce3 step
"""
    check(Schedule.from_text(crossed), "asynchronous")
    check(Schedule.from_text(crossed), "batched")
    with pytest.raises(
        ScheduleError, match=r"rank 0, position 1, SF0>3.0: waits for RF0>3.0, while .* rank 1, position 1"
    ):
        check(Schedule.from_text(crossed), "blocking")
    stuck = crossed.replace("F0.0 SF0>3.0 RF1>2.0 F2.0", "RF1>2.0 F2.0 F0.0 SF0>3.0")
    stuck = stuck.replace("F1.0 SF1>2.0 RF0>3.0 F3.0", "RF0>3.0 F3.0 F1.0 SF1>2.0")
    with pytest.raises(ScheduleError, match=r"waits for SF1>2.0"):
        check(Schedule.from_text(stuck), "asynchronous")


@given(schedules())
def test_text_and_json_round_trip(schedule: Schedule) -> None:
    assert Schedule.from_text(str(schedule)) == schedule
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


def test_receives_are_posted_where_their_values_begin_to_be_computed() -> None:
    early, late = make_schedule("1f1b", 2, 2), TINY
    assert " ".join(map(str, early.ranks[1])).startswith("RF0>1.0 RF0>1.1 F1.0 B1.0")
    assert " ".join(map(str, late.ranks[1])).startswith("RF0>1.0 F1.0 RF0>1.1 B1.0")


def test_the_text_form() -> None:
    assert str(TINY) == (
        "schedule 1f1b microbatches=2 training\n"
        "placement 0 1\n"
        "edges 0>1\n"
        "in_flight 2 1\n"
        "rank 0: F0.0 SF0>1.0 F0.1 SF0>1.1 RB1>0.0 B0.0 RB1>0.1 B0.1 reduce0 step\n"
        "rank 1: RF0>1.0 F1.0 RF0>1.1 B1.0 SB1>0.0 F1.1 B1.1 SB1>0.1 reduce1 step\n"
    )


@pytest.mark.parametrize("text", ["F1", "X0.0", "SF0.1", "step1", "reduce", "F-1.0"])
def test_what_is_no_action_is_named(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action(text)


@pytest.mark.parametrize(
    "data", [{}, {"name": "x"}, {**TINY.to_json(), "placement": ["a"]}, {**TINY.to_json(), "ranks": [1]}]
)
def test_what_is_no_schedule_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ScheduleError, match="not a schedule"):
        Schedule.from_json(data)


@given(schedules())
def test_evaluation_only_goes_forward(schedule: Schedule) -> None:
    forward = forward_only(schedule)
    check(forward, "blocking")
    computed = [i for _, _, i in forward.actions() if i.computes]
    assert {i.kind for i in computed} == {"forward"}
    assert len(computed) == schedule.chunks * schedule.microbatches


def test_one_stage_is_gradient_accumulation() -> None:
    (listed,) = make_schedule("1f1b", 1, 3).ranks
    assert " ".join(map(str, listed)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 reduce0 step"


def test_a_skip_travels_directly_and_a_v_hands_over_on_its_rank() -> None:
    schedule = make_schedule("zb-v", 3, 4, edges=(*chain(6), Edge(0, 4)))
    check(schedule, "blocking")
    text = str(schedule)
    assert "SF0>4.0" in text and "RF0>4.0" in text and "SB4>0.0" in text
    assert "SF2>3" not in text  # chunks 2 and 3 both lie on rank 2


def test_placements() -> None:
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)


BAD = {
    "no such name": (lambda: make_schedule("2f2b", 2, 2), "no schedule is named '2f2b'; one of gpipe, 1f1b"),
    "chunks of 1f1b": (lambda: make_schedule("1f1b", 2, 2, 2), "'1f1b' has 1 chunks per rank, not 2"),
    "chunks of interleaved": (lambda: make_schedule("interleaved", 2, 2, 1), "has 2 or more chunks per rank, not 1"),
    "no microbatch": (lambda: make_schedule("1f1b", 2, 0), "at least one of each"),
    "an edge backwards": (lambda: make_schedule("1f1b", 2, 2, edges=(Edge(1, 0),)), "edge 1>0 of 2 chunks"),
    "an edge twice": (lambda: make_schedule("1f1b", 2, 2, edges=chain(2) * 2), "named twice"),
    "a ring": (
        lambda: complete(
            "ring",
            ((Action("backward", 0, 0), Action("forward", 0, 0)),),
            (0,),
            (),
        ),
        "rank 0 cannot compute B0.0 (position 0): no F0.0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_made_is_explained(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(ScheduleError) as caught:
        make()
    assert message in str(caught.value)
