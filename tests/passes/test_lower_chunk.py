"""Chunk programs: what lowering writes, text in and text out, and that run by the action lists, all ranks in one
process, they compute what one device computes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
import transformers

from autopar.cluster.description import Cluster
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.chunk_program import ChunkProgram
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import parse_placements
from autopar.ir.reshard import Collective
from autopar.ir.stage_meshes import StageMeshes
from autopar.ir.staged_graph import Edge
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.collectives_read_back import collectives_of_stage, difference
from autopar.passes.lower.emit import IN_FLIGHT
from autopar.passes.lower.lower import Lowering
from autopar.passes.lower.lower_chunk import ChunkLowering, lower_chunk
from autopar.placement.prices import Prices
from autopar.schedule.check import check as prove
from autopar.schedule.named import make_schedule
from autopar.search.schedules.chunks import WirePrice
from autopar.search.stage_prices.chunk_price import first_buckets_seconds
from autopar.search.stage_prices.pipeline_breakdown import price_stages
from autopar.verification.widths import default_dtype
from tests.helpers.pass_text import check
from tests.helpers.pipelines import SCHEDULE_NAMES, Wanted, make_pipeline
from tests.helpers.simulate_pipeline import Pipeline
from tests.passes.test_cut import MODELS, _case
from tests.zoo.check import compare

transformers.logging.set_verbosity_error()

# The middle of three chunks, which divides samples; each node has the one strategy that was chosen for it.
MIDDLE = """graph()
    %w: f32[4, 4] = param("w")
      | -> (R)
    %a: f32[8, 4] = receive("a")
      | -> (S(0))
    backward %dy: f32[8, 4] = receive("dy")
      | -> (S(0))
    %y: f32[8, 4] = aten.mm.default(%a, %w)  @middle
      | (S(0)) (R) -> (S(0))
    backward %at: f32[4, 8] = aten.permute.default(%a, [1, 0])
      | (S(0)) -> (S(1))
    backward %dw: f32[4, 4] = aten.mm.default(%at, %dy)
      | (S(1)) (S(0)) -> (P(sum))
    backward %wt: f32[4, 4] = aten.permute.default(%w, [1, 0])
      | (R) -> (R)
    backward %da: f32[8, 4] = aten.mm.default(%dy, %wt)
      | (S(0)) (R) -> (S(0))
    return gradient "w" = %dw
    return send "y" = %y
    return send "da" = %da
    """
WIRES = {Edge(0, 1, "a"): "(S(0))", Edge(1, 2, "y"): "(R)", Edge(2, 1, "dy"): "(S(0))", Edge(1, 0, "da"): "(S(0))"}


def _lowered(graph: Graph) -> ChunkProgram:
    """The first rank's program of the middle chunk under 1F1B, gradients and optimizer state sharded."""
    strategies = {node.name: graph.strategies[node.name][0] for node in graph.nodes}
    places = ParameterPlacement(*map(parse_placements, ("(R)", "(S(0))", "(S(0))")))
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), (2,), annotate(graph, (2,)))
    job = Lowering(graph, Assignment((2,), strategies, {"w": places}), (0,), prices.path, 1 << 20, prices.messages)
    wires = {edge: parse_placements(text) for edge, text in WIRES.items()}
    return lower_chunk(ChunkLowering(job, 1, wires, make_schedule("1f1b", 3, 2), StageMeshes.equal(3, (2,))))


LOWERED = """# chunk 1, rank at (0,) of mesh (2,)
parameter "w" = param "w": f32[4, 4] at (S(0))
placeholder "w" = param "w": f32[4, 4] at (R)
receive "a" = receive "a": f32[8, 4] at (S(0)) over 0>1
send "y" = receive "y": f32[8, 4] at (R) over 1>2
gradient_receive "dy" = receive "dy": f32[8, 4] at (S(0)) over 2>1
gradient_send "da" = receive "da": f32[8, 4] at (S(0)) over 1>0
gradient "w" = gradient "w": f32[4, 4] at (S(0))
refresh(%w):
  %weights = collective.all_gather(%w, axes=[0], dim=0, size=4, before=1)
  %weights_wait = collective.wait(%weights)
  return %weights_wait
forward(%w, %a):
  %y = aten.mm.default(%a, %w)  @middle
  %y_all_gather = collective.all_gather(%y, axes=[0], dim=0, size=8, before=1)
  %y_all_gather_wait = collective.wait(%y_all_gather)
  return %y_all_gather_wait, %a, %w
input_gradient(%a, %w, %dy):
  %wt = aten.permute.default(%w, [1, 0])
  %da = aten.mm.default(%dy, %wt)
  return %da, %a, %dy
weight_gradient(%a, %dy):
  %at = aten.permute.default(%a, [1, 0])
  %dw = aten.mm.default(%at, %dy)
  return %dw
backward(%a, %w, %dy):
  %at = aten.permute.default(%a, [1, 0])
  %dw = aten.mm.default(%at, %dy)
  %wt = aten.permute.default(%w, [1, 0])
  %da = aten.mm.default(%dy, %wt)
  return %da, %dw
more_weight_gradient(%a, %dy, %sum_so_far_0):
  %at = aten.permute.default(%a, [1, 0])
  %sum_so_far_0_more = aten.addmm_.default(%sum_so_far_0, %at, %dy)
  return %sum_so_far_0_more
more_backward(%a, %w, %dy, %sum_so_far_0):
  %at = aten.permute.default(%a, [1, 0])
  %sum_so_far_0_more = aten.addmm_.default(%sum_so_far_0, %at, %dy)
  %wt = aten.permute.default(%w, [1, 0])
  %da = aten.mm.default(%dy, %wt)
  return %da, %sum_so_far_0_more
last(%a, %w, %dy, %sum_so_far_0):
  %at = aten.permute.default(%a, [1, 0])
  %sum_so_far_0_more = aten.addmm_.default(%sum_so_far_0, %at, %dy)
  %wt = aten.permute.default(%w, [1, 0])
  %da = aten.mm.default(%dy, %wt)
  return %da, %sum_so_far_0_more
reduce(%sum_so_far_0_more):
  %gradients = collective.reduce_scatter(%sum_so_far_0_more, axes=[0], op="sum", dim=0, before=1)
  %gradients_wait = collective.wait(%gradients)
  return %gradients_wait
"""


def test_the_program_of_a_chunk_reads() -> None:
    check(_lowered, MIDDLE, LOWERED)


def test_collectives_of_a_stage_are_counted_by_its_schedule() -> None:
    """Weights are gathered and gradients reduced once a step, what is sent is gathered for every microbatch."""
    schedule = make_schedule("1f1b", 3, 2)
    program = PipelineProgram.from_text(f"# pipeline, rank at (1, 0) of mesh (3, 2)\n{schedule}{LOWERED}")
    weight, sent = 4 * 4 * 4, 8 * 4 * 4
    assert collectives_of_stage(program) == {
        Collective("all_gather", (0,), weight): 1,
        Collective("all_gather", (0,), sent): 2,
        Collective("reduce_scatter", (0,), weight): 1,
    }


@default_dtype(torch.float64)
def _check(name: str, wanted: Wanted) -> None:
    case = _case(name)
    made = make_pipeline(case.graph, wanted)
    prove(made.schedule)
    torch.manual_seed(0)
    found = Pipeline(made.programs(), case.values).step()
    compare(found, case.expected, f"{name} {wanted}")


QUICK = [
    ("gpt2", Wanted((4, 1), "1f1b", 5)),
    ("gpt2", Wanted((2, 2), "interleaved", 2, anywhere=True, seed=1)),
    ("gpt2", Wanted((1, 2), "gpipe", 4)),
    ("unet", Wanted((3, 2), "zb-h1", 4, anywhere=True, seed=3)),
    ("resnet", Wanted((3, 2), "1f1b", 1, seed=5)),
    # Stages of unequal numbers of devices; a tied weight on two of them.
    ("gpt2", Wanted((2, 1), "1f1b", 8, unequal=((1,), (3,)))),
    ("gpt2", Wanted((2, 1, 1), "interleaved", 4, unequal=((2, 1), (2, 2)), anywhere=True, seed=1)),
]
UNEQUAL = (((1,), (3,)), ((3,), (2,)), ((1, 2), (2, 2)), ((2,), (1,), (3,)))
REST = (
    [
        ("t5", Wanted((2, 2), "zb-v", 5, anywhere=True, seed=2)),
        ("vit", Wanted((2, 3), "1f1b", 2, anywhere=True, seed=4)),
    ]
    + [
        (name, Wanted(mesh, schedule, count, seed=seed * 10 + turn, anywhere=True))
        for seed, (name, mesh) in enumerate(product(MODELS, [(4, 1), (2, 2), (3, 2), (2, 2, 2)]))
        for turn, (schedule, count) in enumerate(zip(SCHEDULE_NAMES, (1, 2, 5, 8, 5), strict=True))
    ]
    + [
        (name, Wanted((len(meshes), *meshes[0]), schedule, count, seed=seed * 10 + turn, anywhere=True, unequal=meshes))
        for seed, (name, meshes) in enumerate(product(MODELS, UNEQUAL))
        for turn, (schedule, count) in enumerate(zip(SCHEDULE_NAMES, (1, 2, 5, 8, 5), strict=True))
    ]
)
CASES = [*QUICK, *(pytest.param(*rest, marks=pytest.mark.slow) for rest in REST)]


@pytest.mark.parametrize(("name", "wanted"), CASES, ids=str)
def test_chunks_compute_what_one_device_does(name: str, wanted: Wanted) -> None:
    """Whatever is chosen for every node, wherever it is cut."""
    _check(name, wanted)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpt2", Wanted((2, 2), "1f1b", 4, seed=1)),
        pytest.param("t5", Wanted((2, 2, 2), "zb-v", 5, seed=2, anywhere=True), marks=pytest.mark.slow),
        ("unet", Wanted((1, 4), "gpipe", 5, seed=3)),
        ("gpt2", Wanted((2, 1), "1f1b", 4, seed=1, unequal=((1,), (3,)))),
    ],
    ids=str,
)
def test_stages_communicate_what_was_priced(name: str, wanted: Wanted) -> None:
    made = make_pipeline(_case(name).graph, wanted)
    links = {(edge.source, edge.target): WirePrice(1e-5, 1e10) for edge in made.staged.edges}
    breakdown = price_stages(made.chunks, made.wires, made.schedule, made.prices, links, "adamw", made.cluster)
    said = 0
    for stage, held in enumerate(made.schedule.held):
        priced: Counter[Collective] = Counter()
        for line in (line for chunk in held for line in breakdown.breakdowns[chunk].lines):
            for wire in line.collectives:
                priced[wire] += line.times
        found = collectives_of_stage(made.program(made.meshes.ranks(stage).start))
        assert difference(found, priced) == ()
        said += sum(found.values())
    assert said > wanted.microbatches


@pytest.mark.parametrize(
    "wanted", [Wanted((2, 2), "1f1b", 2), Wanted((2, 2), "interleaved", 2), Wanted((2, 2), "zb-v", 4)], ids=str
)
def test_no_gradient_waits_for_a_reduction_before_it_is_sent(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any other computation: what a rank computes last in a step is all that awaits reductions. Of the others
    the price knows whether some set out."""
    monkeypatch.setattr("autopar.search.stage_prices.chunk_price.BUCKET_BYTES", 256)
    made = make_pipeline(_case("gpt2").graph, wanted)
    links = {(edge.source, edge.target): WirePrice(1e-5, 1e10) for edge in made.staged.edges}
    breakdown = price_stages(made.chunks, made.wires, made.schedule, made.prices, links, "adamw", made.cluster)
    under_way = []
    for stage in range(made.schedule.stages):
        for chunk in made.program(made.meshes.ranks(stage).start).chunks.values():
            mine = [i for i in chunk.last.instructions if i.name.startswith("gradients")]
            waits = [i for i in mine if i.op == "collective.wait"]
            if not made.schedule.ends_with(chunk.chunk):
                assert not waits
                under_way.append(len(mine))
                priced = first_buckets_seconds(made.chunks[chunk.chunk].graph, breakdown.breakdowns[chunk.chunk].lines)
                assert (priced > 0) == (len(mine) > 0)
    assert under_way and 0 < max(under_way) <= IN_FLIGHT
