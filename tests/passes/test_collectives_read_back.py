"""The collectives of a lowered program are those of the cost breakdown: kind, axes, bytes and count, whatever the
assignment."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest
import torch

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.placements import parse_placements
from autopar.ir.program import Instruction, Program, Section, TensorSlot
from autopar.ir.reshard import Collective
from autopar.passes.lower.collectives_read_back import collectives_of, difference
from autopar.placement.breakdown import CostBreakdown
from autopar.placement.parameter_choices import parameter_choices
from autopar.planner.request import PlanRequest
from tests.helpers.marks import slow_but
from tests.helpers.models import MODELS
from tests.helpers.planning import Setting, make_request, requested, setting

MESHES = [(4,), (2, 2), (2, 1, 2)]


@cache
def prepared(name: str, mesh: tuple[int, ...]) -> tuple[PlanRequest, Setting]:
    request = requested(name, mesh)
    return request, setting(request)


def priced(breakdown: CostBreakdown) -> Counter[Collective]:
    return Counter(wire for line in breakdown.lines for wire in line.collectives)


def any_assignment(graph: Graph, mesh: tuple[int, ...], seed: int) -> Assignment:
    """Any strategy for every node and any resting places for every parameter."""
    pick = random.Random(seed).choice
    parameters, strategies = {}, {}
    for node in graph.nodes:
        if node.op == "param":
            parameters[node.name] = pick(parameter_choices(graph.strategies[node.name], True))
        else:
            strategies[node.name] = pick(graph.strategies[node.name])
    return Assignment(mesh, strategies, parameters)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["plain", "stack"])
@pytest.mark.parametrize("bucket", slow_but([1, 1 << 30], [1, 1 << 12, 1 << 30]))
def test_random_assignments_do_what_their_cost_breakdown_says(name: str, mesh: tuple[int, ...], bucket: int) -> None:
    _, found = prepared(name, mesh)
    total = 0
    for seed in range(3):
        assignment = any_assignment(found.graph, mesh, seed)
        done = collectives_of(found.program(assignment, bucket=bucket))
        assert difference(done, priced(found.breakdown(assignment))) == (), f"seed {seed}"
        total += done.total()
    assert total > 20


REAL = [("plain", (2, 2)), *(pytest.param(n, m, marks=pytest.mark.slow) for n in MODELS for m in MESHES)]


@pytest.mark.parametrize(("name", "mesh"), REAL)
def test_random_assignments_of_real_models(name: str, mesh: tuple[int, ...]) -> None:
    _, found = prepared(name, mesh)
    assignment = any_assignment(found.graph, mesh, 0)
    done = collectives_of(found.program(assignment))
    assert difference(done, priced(found.breakdown(assignment))) == ()
    assert done.total() > 10


def test_every_rank_does_the_same_collectives() -> None:
    _, found = prepared("stack", (2, 2))
    assignment = any_assignment(found.graph, (2, 2), 7)
    sequences = {
        tuple((i.op, dict(i.kwargs).get("axes")) for i in section.instructions if i.op.startswith("collective."))
        for coordinate in [(0, 0), (0, 1), (1, 0), (1, 1)]
        for section in (found.program(assignment, coordinate).backward,)
    }
    assert len(sequences) == 1


def slot(name: str, shape: tuple[int, ...], text: str) -> TensorSlot:
    return TensorSlot(name, "input", name, shape, parse_placements(text))


def program_of(instructions: tuple[Instruction, ...], *slots: TensorSlot) -> Program:
    names = tuple(s.name for s in slots)
    empty = Section("refresh", (), (), ())
    forward = Section("forward", names, instructions, ())
    return Program((2, 2), (0, 0), (), slots, (), (), (), empty, forward, Section("backward", (), (), ()))


def test_reads_bytes_of_uneven_shards_as_padded() -> None:
    from autopar.ir.node import Value

    gathered = Instruction(
        "g", "collective.all_gather", (Value("x"),), (("axes", (0,)), ("dim", 0), ("size", 5), ("before", 1))
    )
    waited = Instruction("w", "collective.wait", (Value("g"),))
    scattered = Instruction(
        "s", "collective.reduce_scatter_bucket", ((Value("w"), Value("w")),),
        (("axes", (0, 1)), ("op", "sum"), ("dims", (0, 1)), ("befores", (1, 1))),
    )  # fmt: skip
    done = collectives_of(program_of((gathered, waited, scattered), slot("x", (5, 3), "S(0),R")))
    assert done == {
        Collective("all_gather", (0,), 6 * 3 * 4): 1,
        Collective("reduce_scatter", (0, 1), 8 * 3 * 4): 1,
        Collective("reduce_scatter", (0, 1), 5 * 4 * 4): 1,
    }


def test_difference_names_both_sides() -> None:
    one, other = Collective("all_reduce", (0,), 8), Collective("all_gather", (1,), 16)
    assert difference(Counter([one, one]), Counter([one, other])) == (
        "done but not priced: 1 x all_reduce over axes (0,), 8 bytes",
        "priced but not done: 1 x all_gather over axes (1,), 16 bytes",
    )


class Running(torch.nn.Module):
    """Uses the new value of a buffer, which is thereby both an operand and a result, and asks for the gradient of an
    input."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))
        self.linear = torch.nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return ((x - self.mean) ** 2).sum()


def test_a_value_used_and_returned_is_reduced_once() -> None:
    request = make_request(Running(), (torch.randn(8, 12, requires_grad=True),), (2, 2))
    found = setting(request)
    assert {o.kind for o in found.graph.outputs} >= {"mutation", "input_gradient", "gradient"}
    for seed in range(12):
        assignment = any_assignment(found.graph, (2, 2), seed)
        done = collectives_of(found.program(assignment))
        assert difference(done, priced(found.breakdown(assignment))) == (), f"seed {seed}"
