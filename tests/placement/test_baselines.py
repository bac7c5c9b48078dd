"""What a plan is compared with is what people run: DDP, FSDP2 and Megatron's layout exchange what those exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from autopar.cluster.description import Cluster
from autopar.ir.placements import REPLICATE, is_shard, shard_dim
from autopar.passes.annotate.annotate import annotate
from autopar.placement.axis_names import weight_values
from autopar.placement.baselines import Baseline, baselines
from autopar.placement.prices import Prices
from autopar.planner.formulate import formulate
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.search.best_plan import best_plan
from autopar.solver.solve import solve
from tests.helpers.models import Case, gpt2
from tests.helpers.planning import make_request


class Classifier(nn.Module):
    """A loss that is averaged over the labels that count, after two blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)) for _ in "ab")
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), y)


def case() -> Case:
    return Classifier(), (torch.randn(64, 64), torch.randint(0, 10, (64,)))


def slow_links() -> Cluster:
    """Processes joined by gloo, where every message costs milliseconds."""
    return Cluster.get("local")


@cache
def answers(mesh: tuple[int, ...]) -> dict[str, tuple[Baseline, MeshSolution]]:
    model, batch = case()
    request = make_request(model, batch, mesh, cluster=slow_links())
    graph = annotate(step_graph(request.graph, request.loss, request.batch), mesh)
    instance = formulate(request, graph, Prices.of(request.cluster, mesh, graph))
    found = {}
    for line in baselines(instance):
        problem = replace(line.instance.problem, memory_limit=float("inf"))
        found[line.name] = line, MeshSolution.of(line.instance, solve(problem, time_limit=20.0, gap=0.0))
    return found


def takers(found: MeshSolution) -> Iterator[tuple[str, tuple[object, ...], bool]]:
    """The operations that take weights and something of the batch: each operand's placements, and whether it is a
    weight."""
    graph, weights = found.instance.graph, weight_values(found.instance.graph)
    for node in graph.nodes:
        if node.is_placeholder:
            continue
        operands = list(zip(node.operands, found.assignment.strategies[node.name].inputs, strict=True))
        if {value.node in weights for value, _ in operands} == {True, False}:
            yield from ((node.name, places, value.node in weights) for value, places in operands)


def test_there_are_none_on_one_device() -> None:
    model, batch = case()
    request = make_request(model, batch, (1,))
    graph = annotate(step_graph(request.graph, request.loss, request.batch), (1,))
    assert list(baselines(formulate(request, graph, Prices.of(request.cluster, (1,), graph)))) == []


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_ddp_exchanges_gradients_and_nothing_else(mesh: tuple[int, ...]) -> None:
    _, found = answers(mesh)["data parallel"]
    assert {line.kind for line in found.breakdown.lines if line.collectives} <= {"gradient", "reshard"}
    shared = [line for line in found.breakdown.lines if line.kind == "reshard" and line.collectives and line.seconds]
    assert shared == [], "every rank can count the labels of the whole batch by itself"
    for name, places, is_weight in takers(found):
        assert all(p == REPLICATE for p in places) if is_weight else all(map(is_shard, places)), name  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_fsdp_shards_all_that_rests_but_weights_outside_of_blocks(mesh: tuple[int, ...]) -> None:
    _, found = answers(mesh)["FSDP"]
    whole = set()
    for node in found.instance.graph.placeholders("param"):
        place = found.assignment.parameters[node.name]
        assert place.gradient == place.optimizer and all(map(is_shard, place.optimizer)), node.target
        if place.weight != place.optimizer:
            assert all(p == REPLICATE for p in place.weight), node.target
            whole.add(node.target.partition(".")[0])
    assert whole == {"first", "head"}, "the root's weights stay gathered until backward, where messages are slow"


def test_a_plan_is_as_quick_as_the_fsdp_that_it_lists() -> None:
    """Within memory in which the quickest plan, with whole weights, does not fit."""
    model, batch = case()
    request = make_request(model, batch, (4,), cluster=slow_links(), stages=1, microbatches=1)
    needed = best_plan(request, Timings()).baselines["FSDP"]
    assert needed is not None
    limited = replace(request, options=replace(request.options, memory_limit=int(1.05 * needed.peak_bytes)))
    plan = best_plan(limited, Timings())
    fsdp = plan.baselines["FSDP"]
    assert fsdp is not None and plan.predicted.step_seconds <= fsdp.step_seconds * (1 + 1e-9)


def test_megatron_shards_matrices_on_the_innermost_axis() -> None:
    _, found = answers((2, 2))["tensor parallel 2 x data parallel"]
    graph = found.instance.graph
    for node in graph.placeholders("param"):
        place = found.assignment.parameters[node.name].weight
        assert place[0] == REPLICATE, node.target
        assert node.type.rank < 2 or is_shard(place[1]), node.target
    kept = [places[0] for _, places, is_weight in takers(found) if not is_weight]
    assert all(shard_dim(place) == 0 for place in kept), "samples are divided over the outer axis"  # type: ignore[arg-type]
    assert not [one for one in found.breakdown.lines if one.kind == "weight" and one.collectives]


def test_what_ddp_does_costs_what_its_gradients_cost() -> None:
    """On few samples a plan may compute everything everywhere; the comparison says what DDP would take."""
    _, found = answers((4,))["data parallel"]
    breakdown = found.breakdown
    assert breakdown.seconds == pytest.approx(breakdown.seconds_of("compute", "gradient", "optimizer"), rel=0.01)


@pytest.mark.parametrize(
    ("samples", "mesh", "names"),
    [
        (8, (4,), ["data parallel", "FSDP", "tensor parallel 4"]),
        (6, (4,), ["replicated weights", "sharded weights", "tensor parallel 4"]),
        (1, (4,), ["replicated weights", "sharded weights", "tensor parallel 4"]),
        (2, (2, 2), ["replicated weights", "sharded weights", "tensor parallel 2 x data parallel"]),
        (1, (2, 2), ["replicated weights", "sharded weights", "tensor parallel 2 x replicated weights"]),
    ],
)
def test_where_samples_do_not_divide_nothing_is_called_data_parallel(
    samples: int, mesh: tuple[int, ...], names: list[str]
) -> None:
    model, batch = gpt2(1)
    of_samples = {name: value[:1].repeat(samples, 1) for name, value in batch.items()}
    request = make_request(model, of_samples, mesh)
    graph = annotate(step_graph(request.graph, request.loss, request.batch), mesh)
    found = baselines(formulate(request, graph, Prices.of(request.cluster, mesh, graph)))
    assert [each.name for each in found] == names
