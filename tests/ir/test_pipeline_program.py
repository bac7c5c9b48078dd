"""The programs of chunks and pipelines, and their text forms."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.errors import AutoparError, ScheduleError
from autopar.ir.chunk_program import ChunkProgram, Port
from autopar.ir.pipeline_program import PipelineProgram, StagedParameter, StagedResult
from autopar.ir.placements import REPLICATE, parse_placement
from autopar.ir.program import TensorSlot
from autopar.ir.stage_meshes import StageMeshes
from autopar.ir.staged_graph import Edge
from autopar.schedule.messages import forward_only
from autopar.schedule.named import make_schedule
from tests.helpers.planning import planned
from tests.helpers.run_plan import Bench
from tests.ir.test_program import GROUP, MESHES, SLOTS, section

CHUNK = """# chunk 1, rank at (0,) of mesh (2,)
parameter "w" = param "down": f32[4, 8] at (S(0))
placeholder "w" = param "down": f32[4, 8] at (R)
receive "a" = receive "a": f32[8, 4] at (S(0)) over 0>1
result "loss" = output "0": f32[] at (R)
tangent "one" = tangent "0": f32[] at (R)
gradient_send "da" = receive "da": f32[8, 4] at (R) over 1>0
gradient "dw" = gradient "down": f32[4, 8] at (S(0))
refresh(%w):
  return %w
forward(%w, %a):
  %y = aten.mm.default(%a, %w)  @down
  return %y, %a
input_gradient(%a):
  return %a, %a
weight_gradient(%a):
  return %a
backward(%a):
  return %a, %a
more_weight_gradient(%a, %sum_so_far_0):
  return %sum_so_far_0
more_backward(%a, %sum_so_far_0):
  return %a, %sum_so_far_0
last(%a):
  %gradients = collective.all_reduce(%a, axes=[0], op="sum")
  return %gradients
reduce(%gradients):
  %gradients_wait = collective.wait(%gradients)
  return %gradients_wait
"""
PRELUDE = """# rank at () of mesh ()
placeholder "labels" = input "labels": i64[8, 4] at ()
result "count" = output "prelude.count": i64[] at ()
refresh():
  return
forward(%labels):
  %count = aten.sum.default(%labels)
  return %count
backward():
  return
"""
PIPELINE = f"""# pipeline, rank at (1, 0) of mesh (2, 2), draws
schedule 1f1b microbatches=2 training
placement 0 1
edges 0>1
in_flight 2 1
rank 0: F0.0 SF0>1.0 F0.1 SF0>1.1 RB1>0.0 B0.0 RB1>0.1 B0.1 reduce0 step
rank 1: RF0>1.0 F1.0 RF0>1.1 B1.0 SB1>0.0 F1.1 B1.1 SB1>0.1 reduce1 step
input "labels" dim 0
input "prelude.count" whole
parameter "v" = param "up": f32[4, 4] at (R) in chunks 0 1, gradients
parameter "w" = param "down": f32[4, 8] at (S(0)) in chunks 1, gradients 1
result "loss" = output "0": f32[] at (R) from chunk 1, sum
result "y" = output "1": f32[4, 8] at (R) from chunk 1, concatenate:0
{PRELUDE}{CHUNK}"""


def test_a_chunk_round_trips() -> None:
    chunk = ChunkProgram.from_text(CHUNK)
    assert chunk.to_text() == CHUNK
    assert ChunkProgram.from_text(chunk.to_text()) == chunk
    (port,) = chunk.gradient_sends
    assert port == Port(Edge(1, 0, "da"), TensorSlot("da", "receive", "da", (8, 4), (REPLICATE,)))
    assert chunk.receives[0].edge.phase == "forward" and chunk.sends == ()
    assert (chunk.chunk, chunk.mesh, chunk.coordinate) == (1, (2,), (0,))


def test_a_pipeline_round_trips() -> None:
    program = PipelineProgram.from_text(PIPELINE)
    assert program.to_text() == PIPELINE
    assert PipelineProgram.from_text(program.to_text()) == program
    assert (program.stage, program.microbatches, program.draws) == (1, 2, True)
    assert program.schedule == make_schedule("1f1b", 2, 2, prefetch=False)
    assert program.inputs == {"labels": 0, "prelude.count": None}
    assert [(p.chunks, p.gradients) for p in program.parameters] == [((0, 1), ()), ((1,), (1,))]
    assert [r.shape(2) for r in program.results] == [(), (8, 8)]
    assert program.prelude is not None and program.prelude.to_text() == PRELUDE


class Noisy(nn.Module):
    """Tied weights, dropout and a count of labels, which a prelude computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.first(self.embed(ids)), 0.3, self.training)
        logits = self.second(torch.tanh(x)) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2, 2), {"stages": 2, "microbatches": 4, "schedule": "1f1b"}),
        ((2,), {"stages": 2, "microbatches": 2, "schedule": "zb-v"}),
        ((2,), {"stages": 1, "microbatches": 2, "zero": 3}),
    ],
)
def test_programs_of_plans_round_trip(mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    batch = {name: torch.randint(12, (8, 4)) for name in ("ids", "labels")}
    plan = planned(lambda: (Noisy(), batch), mesh, **options)
    bench = Bench(Noisy(), batch)
    for program in bench.programs(plan):
        assert isinstance(program, PipelineProgram) and program.draws and program.prelude is not None
        assert PipelineProgram.from_text(program.to_text()) == program
        for chunk in program.chunks.values():
            assert ChunkProgram.from_text(chunk.to_text()) == chunk


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'starts with a line such as "# chunk 1, rank at (0,) of mesh (2,)"'),
        (PRELUDE, 'starts with a line such as "# chunk 1, rank at (0,) of mesh (2,)"'),
        (CHUNK.replace(" over 0>1", ""), "the line of receive 'a' ends with the chunks of its edge, as in over 0>1"),
        (CHUNK.replace("over 0>1", "in chunks 0 1"), "not with 'in chunks 0 1'"),
        (CHUNK.replace("at (S(0))\nrefresh", "at (S(0)) over 1>0\nrefresh"), "ends with its placements, not with"),
        (CHUNK.replace("gradient_send", "gradient_sent"), "has no 'gradient_sent', only parameter, placeholder"),
        (CHUNK.replace("last(%a)", "final(%a)"), "last and reduce, in this order; found: refresh, forward"),
        (CHUNK.replace("tangent \"0\": f32[] at (R)", "tangent \"0\": f32[] at (Q)"), "'Q' is not a placement"),
        (CHUNK.replace("f32[4, 8] at (R)", "f33[4, 8] at (R)"), "unknown dtype 'f33' in 'f33[4, 8]'"),
    ],
)  # fmt: skip
def test_what_is_no_chunk_is_explained(text: str, message: str) -> None:
    with pytest.raises(AutoparError, match=re.escape(message)):
        ChunkProgram.from_text(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CHUNK, 'starts with a line such as "# pipeline, rank at (1, 0) of mesh (2, 2)"'),
        (PIPELINE.replace("mesh (2, 2), draws", "mesh (2, 2), rolls"), "a pipeline starts with a line such as"),
        (PIPELINE.replace('input "labels"', 'takes "labels"'), "begins with one of schedule, placement, edges"),
        (PIPELINE.replace("dim 0", "along 0"), 'an input is written as in input "x" dim 0, or input "x" whole'),
        (PIPELINE.replace(" in chunks 1, gradients 1", ""), "ends as in 'in chunks 0 1, gradients 0', not with ''"),
        (PIPELINE.replace("from chunk 1, sum", "sum"), "ends as in 'from chunk 1, sum', not with 'sum'"),
        (PIPELINE.replace(PRELUDE, PRELUDE * 2), "one prelude at most; found 2"),
        (PIPELINE.replace("# chunk 1", "# chunk 0"), "stage 1 has the chunks 1 by its schedule; found: 0"),
        (PIPELINE.replace(CHUNK, ""), "stage 1 has the chunks 1 by its schedule; found: none"),
        (PIPELINE.replace("# pipeline, rank at (1,", "# pipeline, rank at (2,"), "on stage 2, but its schedule has 2"),
    ],
)
def test_what_is_no_pipeline_is_explained(text: str, message: str) -> None:
    with pytest.raises(AutoparError, match=re.escape(message)):
        PipelineProgram.from_text(text)


def test_what_is_no_schedule_is_explained_as_in_a_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"'X0.0' is not an action: F2.5"):
        PipelineProgram.from_text(PIPELINE.replace("rank 0: F0.0", "rank 0: X0.0"))
    with pytest.raises(ScheduleError, match="a schedule has lines for schedule, placement"):
        PipelineProgram.from_text(PIPELINE.replace("edges 0>1\n", "").replace("in_flight 2 1\n", ""))


TARGETS = st.text("a_.0\"'\\", max_size=5)


def _port(source: int, target: int, name: str, slot: str) -> Port:
    other = (parse_placement("R"),) if source % 2 else None
    return Port(
        Edge(source, target, name), TensorSlot(slot, "receive", name, (2, 3), (parse_placement("S(0)"),)), other
    )


NUMBERS = st.integers(0, 9)
PORTS = st.lists(st.builds(_port, NUMBERS, NUMBERS, TARGETS, TARGETS), max_size=2).map(tuple)
CHUNK_FIELDS = {
    "chunk": st.just(1),
    "mesh": MESHES,
    "coordinate": MESHES,
    **dict.fromkeys(("parameters", "placeholders", "results", "tangents", "gradients"), GROUP),
    **dict.fromkeys(("receives", "sends", "gradient_receives", "gradient_sends"), PORTS),
    **{name: section(name) for name in ("refresh", "forward", "input_gradient", "weight_gradient", "backward")},
    **{name: section(name) for name in ("more_weight_gradient", "more_backward", "last", "reduce")},
}
CHUNKS = st.builds(ChunkProgram, **CHUNK_FIELDS)
USERS, OWED = (st.lists(NUMBERS, min_size=least, max_size=3).map(tuple) for least in (1, 0))
ELSEWHERE = st.dictionaries(NUMBERS, st.sampled_from([(parse_placement("S(1)"),), (parse_placement("R"),)]), max_size=2)
PARAMETERS = st.lists(st.builds(StagedParameter, SLOTS, USERS, OWED, ELSEWHERE), max_size=2).map(tuple)
COMBINES = st.sampled_from(["sum", "same", "concatenate:1"])
RESULTS = st.lists(st.builds(StagedResult, SLOTS, NUMBERS, COMBINES), max_size=2).map(tuple)


@settings(max_examples=20, phases=[Phase.generate])
@given(CHUNKS)
def test_any_chunk_round_trips(chunk: ChunkProgram) -> None:
    assert ChunkProgram.from_text(chunk.to_text()) == chunk


@settings(max_examples=20, phases=[Phase.generate])
@given(
    st.sampled_from([StageMeshes.equal(2, (2,)), StageMeshes(((1,), (3,))), StageMeshes(((1, 2), (2, 2)))]),
    PARAMETERS,
    RESULTS,
    st.dictionaries(TARGETS, st.none() | NUMBERS, max_size=2),
    st.booleans(),
    CHUNKS,
)
def test_any_pipeline_round_trips(
    meshes: StageMeshes,
    parameters: Any,
    results: Any,
    inputs: dict[str, int | None],
    draws: bool,
    chunk: ChunkProgram,
) -> None:
    schedule = forward_only(make_schedule("gpipe", 2, 3))
    program = PipelineProgram(meshes, (1, 1), schedule, {1: chunk}, parameters, results, inputs, None, draws)
    assert PipelineProgram.from_text(program.to_text()) == program
