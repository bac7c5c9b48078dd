"""Plans for hundreds of devices: what their ranks start in a step matches, message by message, and the check sees it
where something does not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch

import autopar
from autopar import Layout, Options
from autopar.errors import PlanMismatchError
from autopar.ir.chunk_program import SECTIONS
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.program import Section
from autopar.plans.plan import Plan
from autopar.runtime.comm import collectives
from autopar.runtime.comm.groups import AxisGroup
from autopar.runtime.launch import run_local
from autopar.runtime.pipeline.point_to_point import Messenger
from autopar.runtime.rehearse.transcript import Event, Received, Sent, Started, transcript
from autopar.verification.unfolding import Unfolded, disagreeing, spread_ranks, unfold, unmatched
from benchmarks.largest_models import CASES as LARGEST
from benchmarks.published_models import build
from benchmarks.twins import CASES, small_gpt2, unfolded, verified

CLUSTER, MESH = "dgx-a100-80gb", (16, 8)
PIPELINE = Layout(pipeline=2, data=16, tensor=4, microbatch=1, interleave=2, schedule="interleaved")
FOUR_STAGES = Layout(pipeline=4, data=16, tensor=2, microbatch=1, interleave=2, schedule="zb-v", zero=2)
FLAT = Layout(data=32, tensor=4, zero=3)


@cache
def wide(layers: int = 4) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """As wide as GPT-3, of few layers."""
    shape = replace(LARGEST["GPT-3 175B"].shape, layers=layers)
    ids = torch.empty((64, shape.seq), dtype=torch.int64, device="meta")
    return build(shape, torch.float32), (ids, ids)


@cache
def planned(layout: Layout, layers: int = 4) -> Plan:
    model, batch = wide(layers)
    return autopar.plan(model, MESH, batch, cluster=CLUSTER, options=Options(layout=layout, precision="bf16"))


@cache
def ranks_of(layout: Layout, layers: int = 4) -> Unfolded:
    model, batch = wide(layers)
    return unfold(model, planned(layout, layers), batch, cluster=CLUSTER)


def check_compared(found: Unfolded) -> None:
    """Everything that a sampled rank starts is compared with what another does."""
    for rank in found.sampled:
        others, events = found.transcripts.keys() - {rank}, found.transcripts[rank]
        assert all(others & set(event.group) for event in events if isinstance(event, Started))
        assert {event.peer for event in events if not isinstance(event, Started)} <= others


def test_ranks_of_a_pipeline_match() -> None:
    plan, found = planned(PIPELINE), ranks_of(PIPELINE)
    assert (plan.stages, plan.mesh, plan.schedule, plan.microbatches) == (2, (16, 4), "interleaved", 4)
    assert found.unmatched == ()
    assert len(found.sampled) == 10 and {0, 127} <= set(found.sampled)
    check_compared(found)
    kinds = {type(event) for events in found.transcripts.values() for event in events}
    assert kinds == {Started, Sent, Received}


@pytest.mark.slow
def test_ranks_of_more_stages_match() -> None:
    plan, found = planned(FOUR_STAGES, 8), ranks_of(FOUR_STAGES, 8)
    assert found.unmatched == ()
    assert {plan.stage_meshes.place(rank)[0] for rank in found.transcripts} == {0, 1, 2, 3}
    check_compared(found)


@pytest.mark.slow
def test_ranks_without_stages_match() -> None:
    found = ranks_of(FLAT, 2)
    assert found.unmatched == ()
    check_compared(found)
    started = {event for events in found.transcripts.values() for event in events if isinstance(event, Started)}
    assert {event.kind for event in started} >= {"all_gather", "reduce_scatter"}
    assert {len(event.group) for event in started} >= {4, 32}


def test_sampled_ranks_are_spread() -> None:
    plan, ranks = planned(PIPELINE), spread_ranks(planned(PIPELINE))
    assert len(ranks) == len(set(ranks)) == 10
    places = [plan.stage_meshes.place(rank) for rank in ranks]
    assert {(stage, (data, tensor)) for stage in (0, 1) for data in (0, 15) for tensor in (0, 3)} <= set(places)
    assert (1, (8, 2)) in places, "the middle"
    assert spread_ranks(plan, 500) == tuple(range(128))


Change = Callable[[list[Event], int], None]


def _drop(events: list[Event], at: int) -> None:
    del events[at]


def _repeat(events: list[Event], at: int) -> None:
    events.insert(at, events[at])


def _resize(events: list[Event], at: int) -> None:
    events[at] = replace(events[at], shape=(*events[at].shape[:-1], 3))


def _retype(events: list[Event], at: int) -> None:
    events[at] = replace(events[at], dtype=torch.float64)


def _swap(events: list[Event], at: int) -> None:
    """With the next that the same ranks have to do with and that is another."""
    mine = events[at]
    own = mine.group if isinstance(mine, Started) else (type(mine), mine.peer)
    for later in range(at + 1, len(events)):
        other = events[later]
        if own == (other.group if isinstance(other, Started) else (type(other), other.peer)) and other != mine:
            events[at], events[later] = other, mine
            return


@pytest.mark.parametrize("change", [_drop, _repeat, _resize, _retype, _swap])
def test_a_change_of_one_event_is_seen(change: Change) -> None:
    found, pick = ranks_of(PIPELINE), random.Random(0)
    for rank in found.sampled:
        for kind in (Started, Sent, Received):
            places = [at for at, event in enumerate(found.transcripts[rank]) if isinstance(event, kind)]
            events = list(found.transcripts[rank])
            change(events, pick.choice(places[: -len(places) // 4]))
            assert events != list(found.transcripts[rank]), (rank, kind)
            lines = unmatched({**found.transcripts, rank: tuple(events)})
            assert lines and all(f"rank {rank} " in line for line in lines), (rank, kind)


def _moved_up(section: Section) -> Section:
    """The section with a collective before one that stands before it: both have what they need there."""
    listed = list(section.instructions)
    places = {value: at for at, i in enumerate(listed) for value in [i.name]}
    starts = [at for at, i in enumerate(listed) if "axes" in dict(i.kwargs) and i.op not in LOCAL]
    for first, second in itertools.combinations(starts, 2):
        ready = all(places.get(value.node, -1) < first for value in listed[second].operands)
        if ready and dict(listed[first].kwargs)["axes"] == dict(listed[second].kwargs)["axes"]:
            listed.insert(first, listed.pop(second))
            return replace(section, instructions=tuple(listed))
    return section


LOCAL = ("collective.slice", "collective.partial")


def test_collectives_in_another_order_are_seen() -> None:
    """Also where those that change places are of equal form: their operands have other names."""
    found, seen = ranks_of(PIPELINE), set()
    program = found.programs[63]
    assert isinstance(program, PipelineProgram)
    for index, chunk in program.chunks.items():
        for name in SECTIONS:
            section = getattr(chunk, name)
            if (moved := _moved_up(section)) != section:
                changed = replace(program, chunks={**program.chunks, index: replace(chunk, **{name: moved})})
                (line,) = disagreeing({**found.programs, 63: changed})
                assert f"ranks 0 and 63 differ in chunk {index}" in line
                seen.add(name)
    assert seen == {"reduce"}, "elsewhere each needs what the ones before it give"


def test_a_rank_with_another_schedule_is_seen() -> None:
    """A receive is posted before another of equal form: what they carry tells them apart."""
    found = ranks_of(PIPELINE)
    program = found.programs[0]
    assert isinstance(program, PipelineProgram)
    listed = list(program.schedule.ranks[0])
    first, second = [at for at, action in enumerate(listed) if action.kind == "receive_backward"][:2]
    listed.insert(first, listed.pop(second))
    ranks = (tuple(listed), *program.schedule.ranks[1:])
    changed = replace(program, schedule=replace(program.schedule, ranks=ranks))
    assert any("what all ranks know" in line for line in disagreeing({**found.programs, 0: changed}))
    lines = unmatched({**found.transcripts, 0: transcript(changed)})
    assert lines and all("rank 0 receives" in line for line in lines)


def test_only_the_batch_that_was_planned_is_unfolded() -> None:
    model, (ids, _) = wide()
    with pytest.raises(PlanMismatchError, match="the batch has 32 rows, but the plan was made for 64"):
        unfold(model, planned(PIPELINE), (ids[:32], ids[:32]), cluster=CLUSTER, ranks=(0,))


def _plainly(event: Event) -> tuple[object, ...]:
    """Without names, which only a transcript has."""
    if isinstance(event, Started):
        return event.kind, event.op, str(event.dtype), event.shape, len(event.group)
    return type(event).__name__, event.peer, str(event.dtype), event.shape


def _started_by_a_process(rank: int, world: int, text: str) -> list[tuple[object, ...]]:
    """What a process starts in a step under a plan."""
    parallel = autopar.parallelize(small_gpt2(), (world,), plan=Plan.from_json(text), cluster=CLUSTER)
    batch = CASES["gpt2"].twin_batch()
    parallel.step(**batch)
    notes: list[tuple[object, ...]] = []
    exchange, send, receive = collectives._exchange, Messenger.send, Messenger.receive

    def exchanging(group: AxisGroup, kind: str, operand: torch.Tensor, op: str = "") -> Any:
        notes.append((kind, op, str(operand.dtype), tuple(operand.shape), group.size))
        return exchange(group, kind, operand, op)

    def sending(self: Messenger, tensors: Any, crossings: Any, stage: int) -> None:
        note("Sent", self, tensors, crossings, stage)
        send(self, tensors, crossings, stage)

    def receiving(self: Messenger, crossings: Any, stage: int) -> Any:
        arrival = receive(self, crossings, stage)
        note("Received", self, arrival.tensors, crossings, stage)
        return arrival

    def note(kind: str, self: Messenger, tensors: Any, crossings: Any, stage: int) -> None:
        for tensor, crossing in zip(tensors, crossings, strict=True):
            for piece in crossing.pieces:
                peer = self.stages.ranks[self.stages.peer(stage, piece.device)]
                notes.append((kind, peer, str(tensor.dtype), tuple(piece.of(tensor).shape)))

    collectives._exchange, Messenger.send, Messenger.receive = exchanging, sending, receiving  # type: ignore[method-assign]
    parallel.step(**batch)
    return notes


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline=2 data=2 microbatch=2 schedule=1f1b zero=1", "data=2 tensor=2 zero=3"])
def test_processes_start_what_transcripts_say(layout: str) -> None:
    """Tied weights included, which the two stages share."""
    model, batch = small_gpt2(), CASES["gpt2"].twin_batch()
    options = Options(layout=Layout.parse(layout))
    plan = autopar.plan(model, (4,), batch, cluster=CLUSTER, options=options)
    found = unfold(model, plan, batch, cluster=CLUSTER)
    assert found.unmatched == () and found.sampled == (0, 1, 2, 3)
    assert found.events > 30
    for rank, notes in enumerate(run_local(_started_by_a_process, 4, timeout=200.0, args=(plan.to_json(),))):
        assert notes == list(map(_plainly, found.transcripts[rank])), f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twins_of_the_largest_plans_run(name: str) -> None:
    row = verified(name)
    assert row["ok"] and not row["unpriced"], row
    degrees = dict(word.split("=") for word in CASES[name].twin_layout.split())
    assert all(
        row[key] == int(degrees.get(word, 1)) for key, word in (("stages", "pipeline"), ("chunks", "interleave"))
    )
    assert row["schedule"] == degrees.get("schedule")
    assert math.prod(row["mesh"]) * row["stages"] == 8
    assert (row["recomputed"] > 0) == ("recompute" in degrees)


@pytest.mark.slow
def test_ranks_of_the_largest_plan_match() -> None:
    """GPT-3 175B on 1024 devices, in 16 stages."""
    row = unfolded("gpt3-175b-in-stages")
    assert row["unmatched"] == [] and row["events"] > 50_000
    assert row["peak_gib"] < 4.0


@pytest.mark.parametrize("wrong", [0, 1, 9])
def test_what_is_printed_is_short(wrong: int) -> None:
    events = [cast(Event, None)] * 1000
    unlike = tuple(f"rank {n}: {'x' * 400}" for n in range(wrong))
    found = Unfolded((0,), {0: events, 1: events}, unlike, {})
    text = str(found)
    assert "1 ranks and 1 that these exchange something with start 2000" in text
    assert len(text.splitlines()) == 1 + min(wrong, 5) + (wrong > 5) and max(map(len, text.splitlines())) <= 160
    assert ("all match" in text) == found.ok and ("4 more" in text) == (wrong == 9)
    assert len(repr(found)) < 100 and ("all matched" in repr(found)) == found.ok
