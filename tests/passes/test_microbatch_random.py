"""Microbatches and chunks draw the numbers of the whole batch, on one device and on many."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import transformers
from torch import nn

from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ops.random import DRAWS
from autopar.passes.annotate.annotate import annotate
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.microbatch import Microbatched, microbatch
from tests.helpers.eager_draws import STATE
from tests.helpers.interpret import interpret
from tests.helpers.lowering import plain
from tests.helpers.marks import slow_but
from tests.helpers.microbatches import run_microbatches
from tests.helpers.simulate import World
from tests.helpers.stage_run import check_staged, run_chunks
from tests.ops.test_random_training import Noisy
from tests.zoo.check import Case, compare, make_case, prices_for, programs, random_assignment

transformers.logging.set_verbosity_error()

# A draw with the batch as dim 1, one where sequence and batch are one dim, one that no sample is told apart by, one
# that is a dim of the batch where samples are not known, and a sum over samples of what depends on draws alone.
AWKWARD = """
graph()
%random: i64[4] = random("random")
%x: f32[8, 3] = input("x")
%w: f32[3] = param("w")
%y: f32[8, 3] = aten.mul.Tensor(%x, %w)
%t: f32[3, 8] = aten.permute.default(%y, [1, 0])
%u: f32[3, 8] = autopar.uniform.default(%random, [3, 8], dtype=torch.float32, device=device("cpu"), place=0, samples=[1, 3])
%tu: f32[3, 8] = aten.add.Tensor(%t, %u)
%flat: f32[24] = aten.reshape.default(%tu, [24])
%n: f32[24] = autopar.normal.default(%random, [24], dtype=torch.float32, device=device("cpu"), place=1, samples=[0, 3])
%fn: f32[24] = aten.mul.Tensor(%flat, %n)
%back: f32[3, 8] = aten.reshape.default(%fn, [3, 8])
%same: f32[3, 1] = autopar.uniform.default(%random, [3, 1], dtype=torch.float32, device=device("cpu"), place=2)
%wide: f32[3, 8] = aten.expand.default(%same, [3, 8])
%bs: f32[3, 8] = aten.add.Tensor(%back, %wide)
%unknown: f32[3, 8] = autopar.uniform.default(%random, [3, 8], dtype=torch.float32, device=device("cpu"), place=3)
%bu: f32[3, 8] = aten.mul.Tensor(%bs, %unknown)
%kept: b8[8] = autopar.bernoulli.default(%random, [8], 0.5, dtype=torch.bool, device=device("cpu"), place=4, samples=[0, 1])
%some: f32[3, 8] = aten.mul.Tensor(%bu, %kept)
%total: f32[] = aten.sum.default(%some)
%count: i64[] = aten.sum.default(%kept)
%loss: f32[] = aten.div.Tensor(%total, %count)
return output "0" = %loss
return output "1" = %some
return output "2" = %same
"""  # noqa: E501


def _values() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 3), "w": torch.randn(3), "random": STATE}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_pieces_of_every_kind_of_draw(count: int) -> None:
    graph, values = Graph.from_text(AWKWARD), _values()
    made = microbatch(graph, count)
    assert made.combine == {("output", "0"): "sum", ("output", "1"): "concatenate:1", ("output", "2"): "same"}
    drawn = {node.name: dict(node.kwargs) for node in made.graph if node.op in DRAWS}
    assert drawn["u_piece"]["samples"] == (1, 24 // count)
    assert drawn["n_piece"]["counts"] == (3, 8 // count)
    assert drawn["same"].get("samples") is None
    compare(run_microbatches(made, values), interpret(graph, values), f"{count} microbatches", 1e-6)


def test_a_count_of_what_inputs_and_draws_keep_comes_from_the_prelude() -> None:
    graph = Graph.from_text("""
    graph()
    %random: i64[4] = random("random")
    %x: f32[8] = input("x")
    %w: f32[] = param("w")
    %drawn: b8[8] = autopar.bernoulli.default(%random, [8], 0.5, dtype=torch.bool, device=device("cpu"), samples=[0, 1])
    %positive: b8[8] = aten.gt.Scalar(%x, 0.0)
    %kept: b8[8] = aten.logical_and.default(%drawn, %positive)
    %count: i64[] = aten.sum.default(%kept)
    %y: f32[8] = aten.mul.Tensor(%x, %w)
    %masked: f32[8] = aten.mul.Tensor(%y, %kept)
    %mean: f32[8] = aten.div.Tensor(%masked, %count)
    return output "0" = %mean
    """)
    made = microbatch(graph, 2)
    assert made.prelude is not None
    assert [node.name for node in made.prelude] == ["random", "x", "drawn", "positive", "kept", "count"]
    values = {"x": torch.randn(8).abs(), "w": torch.tensor(2.0), "random": STATE}
    compare(run_microbatches(made, values), interpret(graph, values), "microbatches", 1e-6)


def test_a_draw_that_is_the_same_for_all() -> None:
    """A dim of samples that nobody divides: every microbatch draws the whole."""
    graph = Graph.from_text("""
    graph()
    %random: i64[4] = random("random")
    %x: f32[4, 3] = input("x")
    %u: f32[3, 4] = autopar.uniform.default(%random, [3, 4], dtype=torch.float32, device=device("cpu"), samples=[1, 3])
    %y: f32[4, 4] = aten.mm.default(%x, %u)
    return output "0" = %y
    """)
    made = microbatch(graph, 2)
    (drawn,) = (dict(node.kwargs) for node in made.graph if node.op in DRAWS)
    assert drawn["samples"] == (1, 0)
    values = {"x": torch.randn(4, 3), "random": STATE}
    compare(run_microbatches(made, values), interpret(graph, values), "microbatches", 1e-6)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_pieces_are_sharded_on_devices(mesh: tuple[int, ...]) -> None:
    """Part of a part: the microbatches by time, within each the devices by place."""
    graph, values = Graph.from_text(AWKWARD), _values()
    made = microbatch(graph, 2)
    annotated = annotate(made.graph, mesh)
    prices = prices_for(annotated, mesh)
    expected = interpret(graph, values)
    for seed in range(4):
        assignment = random_assignment(annotated, mesh, seed)
        world = World(programs(annotated, assignment, prices))

        def run(given: dict[str, torch.Tensor], world: World = world) -> dict[tuple[str, str], torch.Tensor | None]:
            results, _ = world.step(given, {})
            return {("output", name): results[name] for name in "012"}

        compare(run_microbatches(made, values, run), expected, f"{mesh}, seed {seed}", 1e-5)  # type: ignore[arg-type]


@cache
def _noisy() -> Case:
    torch.manual_seed(0)
    case = make_case(Noisy(), (torch.randn(6, 7, 12),))
    return Case(plain(case.graph), case.values, case.expected)


def _check_cuts(made: Microbatched, case: Case, seed: int, trials: int) -> None:
    forward = [node.name for node in made.graph if node.phase == "forward" and not node.is_placeholder]
    draw = random.Random(seed)
    for _ in range(trials):
        cuts = tuple(forward[place] for place in sorted(draw.sample(range(1, len(forward)), 3)))
        staged = cut(made, cuts)
        check_staged(staged, made.graph)
        found = run_microbatches(made, case.values, lambda values, staged=staged: run_chunks(staged, values))  # type: ignore[misc]
        compare(found, case.expected, f"cut at {cuts}")


@pytest.mark.parametrize("count", slow_but([3], [2, 3, 6]))
def test_a_model_that_draws_everywhere(count: int) -> None:
    """Dropout, attention that drops, noise: in backward, recomputed, and in chunks cut anywhere."""
    case = _noisy()
    made = microbatch(case.graph, count)
    compare(run_microbatches(made, case.values), case.expected, f"{count} microbatches")
    _check_cuts(made, case, count, 3)


def test_masks_are_drawn_again_rather_than_sent() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    case = make_case(Net(), (torch.randn(4, 4),))
    graph = plain(case.graph)
    after = [node.name for node in graph if node.op in DRAWS]
    uses = [graph.users[Value(name)][0][0].name for name in after]
    staged = cut(graph, tuple(uses))
    assert not any(edge.name in after for edge in staged.edges)
    assert [len(chunk.placeholders("random")) for chunk in staged.chunks] == [0, 1, 1]
    compare(run_chunks(staged, case.values), case.expected, "masks")
