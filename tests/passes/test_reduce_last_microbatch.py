"""The last microbatch of a chunk, text out: gradients set out as soon as they are made, and what is left is apart."""

from __future__ import annotations

import pytest

from autopar.cluster.description import Cluster
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.chunk_program import ChunkProgram
from autopar.ir.graph import Graph
from autopar.ir.placements import Strategy
from autopar.ir.program import Section
from autopar.ir.stage_meshes import StageMeshes
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.lower import Lowering
from autopar.passes.lower.lower_chunk import ChunkLowering, lower_chunk
from autopar.passes.recompute.saved_values import save_activations
from autopar.placement.prices import Prices
from autopar.schedule.named import make_schedule
from autopar.schedule.schedule import chain
from tests.passes.test_lower_text import BATCH, PERCEPTRON, REPLICATED, ZERO_3, across


def chunk(microbatches: int, rests: dict[str, str], bucket: int, schedule: str = "gpipe", of: int = 1) -> ChunkProgram:
    """The perceptron's program, samples divided, as one stage runs it: the last of so many chunks."""
    graph = annotate(save_activations(Graph.from_text(PERCEPTRON)), (2,))
    strategies = {
        node.name: Strategy(*(across([side]) for side in BATCH[node.name].split("->")))
        for node in graph.nodes
        if node.op != "param"
    }
    places = {name: ParameterPlacement(*across([text])) for name, text in rests.items()}
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), (2,), graph)
    job = Lowering(graph, Assignment((2,), strategies, places), (0,), prices.path, bucket, prices.messages)
    ordered = make_schedule(schedule, 1, microbatches, of, edges=chain(of))
    return lower_chunk(ChunkLowering(job, of - 1, {}, ordered, StageMeshes.equal(1, job.mesh)))


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_a_full_bucket_leaves_while_backward_computes_on() -> None:
    """Added up by the product itself, the first gradient travels while the second is made; both are awaited apart."""
    found = chunk(2, REPLICATED, 1)
    assert lines(str(found.last)) == lines("""
        last(%a_rest, %down, %x, %one, %sum_so_far_0, %sum_so_far_1):
          %dy = aten.expand.default(%one, [4, 4])
          %at = aten.permute.default(%a_rest, [1, 0])
          %sum_so_far_1_more = aten.addmm_.default(%sum_so_far_1, %at, %dy)
          %gradients = collective.all_reduce(%sum_so_far_1_more, axes=[0], op="sum")
          %downt = aten.permute.default(%down, [1, 0])
          %da = aten.mm.default(%dy, %downt)
          %dh = aten.tanh_backward.default(%da, %a_rest)
          %xt = aten.permute.default(%x, [1, 0])
          %sum_so_far_0_more = aten.addmm_.default(%sum_so_far_0, %xt, %dh)
          %gradients_1 = collective.all_reduce(%sum_so_far_0_more, axes=[0], op="sum")
          return %gradients, %gradients_1
    """)
    assert lines(str(found.reduce)) == lines("""
        reduce(%gradients, %gradients_1):
          %gradients_wait = collective.wait(%gradients)
          %gradients_1_wait = collective.wait(%gradients_1)
          return %gradients_1_wait, %gradients_wait
    """)


def test_weights_are_gathered_and_what_is_no_full_bucket_leaves_at_the_end() -> None:
    found = chunk(2, ZERO_3, 1 << 20)
    assert lines(str(found.last)) == lines("""
        last(%a_rest, %down, %x, %one, %sum_so_far_0, %sum_so_far_1):
          %down_all_gather = collective.all_gather(%down, axes=[0], dim=0, size=8, before=1)
          %dy = aten.expand.default(%one, [4, 4])
          %at = aten.permute.default(%a_rest, [1, 0])
          %sum_so_far_1_more = aten.addmm_.default(%sum_so_far_1, %at, %dy)
          %down_all_gather_wait = collective.wait(%down_all_gather)
          %downt = aten.permute.default(%down_all_gather_wait, [1, 0])
          %da = aten.mm.default(%dy, %downt)
          %dh = aten.tanh_backward.default(%da, %a_rest)
          %xt = aten.permute.default(%x, [1, 0])
          %sum_so_far_0_more = aten.addmm_.default(%sum_so_far_0, %xt, %dh)
          return %sum_so_far_1_more, %sum_so_far_0_more
    """)
    assert lines(str(found.reduce)) == lines("""
        reduce(%sum_so_far_1_more, %sum_so_far_0_more):
          %gradients = collective.reduce_scatter_bucket([%sum_so_far_1_more, %sum_so_far_0_more], axes=[0], \
op="sum", dims=[0, 0], befores=[1, 1])
          %gradients_wait, %gradients_wait.1 = collective.wait(%gradients)
          return %gradients_wait.1, %gradients_wait
    """)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_it_stands_for_what_the_schedule_would_run(schedule: str, microbatches: int) -> None:
    """It takes what that takes: of the only microbatch no sums, of a backward in halves what the first half leaves."""
    found = chunk(microbatches, REPLICATED, 1 << 20, schedule)
    several = microbatches > 1
    if schedule == "gpipe":
        same = found.more_backward if several else found.backward
    else:
        same = found.more_weight_gradient if several else found.weight_gradient
    assert found.last.inputs == same.inputs
    assert found.last.instructions == same.instructions, "one bucket, which is full at the end"
    assert set(found.last.outputs) == set(same.outputs)
    assert len(found.reduce.inputs) == len(found.reduce.outputs) == 2


@pytest.mark.parametrize("of", [1, 2])
def test_only_the_end_of_a_rank_waits_for_a_bucket(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has something to compute or to send after this backward does not hold it up: the bucket for which it
    would wait sets out after it."""
    monkeypatch.setattr("autopar.passes.lower.emit.IN_FLIGHT", 1)
    found = chunk(2, REPLICATED, 1, of=of)

    def collectives(section: Section) -> list[str]:
        return [i.op.removeprefix("collective.") for i in section.instructions if i.op.startswith("collective.")]

    if of == 1:
        assert collectives(found.last) == ["all_reduce", "all_reduce", "wait"]
        assert collectives(found.reduce) == ["wait"]
    else:
        assert collectives(found.last) == ["all_reduce"]
        assert collectives(found.reduce) == ["all_reduce", "wait", "wait"]
