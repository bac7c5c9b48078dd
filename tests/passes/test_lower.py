"""Lowered programs compute what the graph computes, whatever the assignment: the best, the baselines, and random
ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import nn

from autopar.cluster.description import Cluster
from autopar.ir.assignment import Assignment, uses
from autopar.ir.graph import Graph
from autopar.ir.node import CAST
from autopar.ir.program import Program, Section
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.lower.overlap import STARTS, WAIT, overlap
from autopar.passes.normalise.standard import normalise
from autopar.placement.parameter_choices import parameter_choices
from autopar.placement.prices import Prices
from autopar.planner.step_graphs import step_graph
from autopar.trace.tracer import trace
from tests.helpers.interpret import interpret
from tests.helpers.simulate import World


class Mixed(nn.Module):
    """Embedding, fused projection split in three, heads, layer norm, one tensor twice in one op, tied head, exact mean
    loss."""

    def __init__(self, vocabulary: int = 13, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm(x)).split(w, -1)
        q, k, v = (t.view(b, s, self.heads, w // self.heads).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        x = x * x
        logits = x @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@dataclass
class Case:
    graph: Graph
    values: dict[str, torch.Tensor]
    expected: dict[tuple[str, str], torch.Tensor | None]


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    model = Mixed().double()
    ids = torch.randint(0, 13, (4, 6))
    labels = torch.where(torch.rand(4, 6) < 0.3, -100, ids)
    traced = trace(model, (ids, labels), device="cpu")
    graph = step_graph(normalise(traced.graph), traced.signature.loss, 4)
    inputs = [node.target for node in graph.placeholders("input")]
    values = {**dict(model.named_parameters()), **dict(zip(inputs, (ids, labels), strict=True))}
    values = {name: value.detach() for name, value in values.items()}
    from tests.helpers.lowering import plain

    return Case(graph, values, interpret(plain(graph), values))


def random_assignment(graph: Graph, mesh: tuple[int, ...], seed: int) -> Assignment:
    """Any strategy for every node, any resting places for every parameter: nothing a planner would choose, all it
    could."""
    generator = random.Random(seed)
    parameters, strategies = {}, {}
    for node in graph.nodes:
        if node.op == "param":
            parameters[node.name] = generator.choice(parameter_choices(graph.strategies[node.name], True))
        else:
            strategies[node.name] = generator.choice(graph.strategies[node.name])
    return Assignment(mesh, strategies, parameters)


def programs(graph: Graph, assignment: Assignment, prices: Prices, bucket: int = 256) -> list[Program]:
    coordinates = itertools.product(*map(range, assignment.mesh))
    jobs = (Lowering(graph, assignment, c, prices.path, bucket, prices.messages) for c in coordinates)
    return [overlap(lower(job, graph.outputs)) for job in jobs]


@pytest.mark.parametrize(
    "mesh",
    [(2,), pytest.param((4,), marks=pytest.mark.slow), (2, 2), pytest.param((2, 1, 2), marks=pytest.mark.slow), (3,)],
)
def test_any_assignment_gives_the_loss_and_gradients_of_one_device(case: Case, mesh: tuple[int, ...]) -> None:
    graph = annotate(case.graph, mesh)
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), mesh, graph)
    tangents = {node.target: torch.ones((), dtype=torch.float64) for node in graph.placeholders("tangent")}
    communicating = 0
    for seed in range(6):
        assignment = random_assignment(graph, mesh, seed)
        world = World(programs(graph, assignment, prices))
        results, gradients = world.step(case.values, tangents)
        for (kind, name), expected in case.expected.items():
            found = results[name] if kind == "output" else gradients[name]
            assert expected is not None
            torch.testing.assert_close(
                found.double(), expected.double(), rtol=1e-9, atol=1e-12, msg=f"{kind} {name}, seed {seed}"
            )
        communicating += sum(use.source != use.target for use in uses(graph, assignment))
    assert communicating > 50


def in_flight(section: Section) -> dict[str, int]:
    """How many reductions of gradients are in flight when an instruction begins, of all that compute, by name."""
    starts = {i.name for i in section.instructions if i.name.startswith("gradients") and i.op in STARTS}
    flying, before = set[str](), dict[str, int]()
    for instruction in section.instructions:
        if not instruction.op.startswith("collective."):
            before[instruction.name] = len(flying)
        flying |= {instruction.name} & starts
        flying -= {value.node for value in instruction.operands} if instruction.op == WAIT else set()
    return before


def reduced(section: Section) -> set[str]:
    """The instructions whose results reductions of gradients take."""
    starts = (i for i in section.instructions if i.name.startswith("gradients") and i.op in STARTS)
    return {value.node for start in starts for value in start.operands}


@pytest.mark.parametrize("seed", range(4))
def test_while_a_gradient_is_computed_one_bucket_is_in_flight(case: Case, seed: int) -> None:
    """Of buckets that each gradient fills: that which it fills is the second. Large gradients are much of what a step
    holds where its backward begins."""
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), (2, 2), annotate(case.graph, (2, 2)))
    graph = annotate(case.graph, (2, 2))
    section = programs(graph, random_assignment(graph, (2, 2), seed), prices, bucket=1)[0].backward
    before = in_flight(section)
    counts = [before[name] for name in reduced(section) & before.keys()]
    assert len(counts) >= 2
    assert max(counts) == 1


class Halves(nn.Sequential):
    """Products in bf16 of weights in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cast("torch.Tensor", super().forward(x)).float().pow(2).mean()


def test_a_bucket_is_in_flight_behind_a_product_but_not_behind_the_cast_of_its_gradient() -> None:
    model = Halves(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    traced = trace(model, (torch.rand(4, 8),), device="cpu")
    graph = annotate(step_graph(normalise(traced.graph), traced.signature.loss, 4), (2,))
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), (2,), graph)
    casts, products = list[int](), list[int]()
    for seed in range(8):
        section = programs(graph, random_assignment(graph, (2,), seed), prices, bucket=1)[0].backward
        before, sent = in_flight(section), reduced(section)
        casts += [before[each.name] for each in section.instructions if each.op == CAST and each.name in sent]
        products += [before[each.name] for each in section.instructions if each.op == "aten.mm.default"]
    assert len(casts) > 8 and set(casts) == {0}
    assert max(products) == 1
