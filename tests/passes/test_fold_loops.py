"""Steps of loops that a trace unrolled: which of them are tied, and that plans of such a model are right."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.annotate.fold_loops import LEAST_STEPS
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.lower.overlap import overlap
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from tests.helpers.planning import gradients_of, make_request, slow_devices
from tests.helpers.simulate import World


def recurrence(steps: int) -> Graph:
    """y = tanh(x[:, i] + y) * x[:, i], twice the same type and operation in one step: a sum is in either place."""
    lines = ['%x: f32[8, 64] = input("x")', '%y0: f32[8] = input("y")']
    for i in range(steps):
        lines += [
            f"%at{i}: f32[8] = aten.select.int(%x, 1, {i})  @scan",
            f"%sum{i}: f32[8] = aten.add.Tensor(%at{i}, %y{i})  @scan",
            f"%twice{i}: f32[8] = aten.add.Tensor(%sum{i}, %sum{i})  @scan",
            f"%y{i + 1}: f32[8] = aten.tanh.default(%twice{i})  @scan",
        ]
    return Graph.from_text("\n".join(["graph()", *lines, f'return output "0" = %y{steps}', ""]))


def test_steps_away_from_the_ends_of_a_loop_choose_alike() -> None:
    classes = fold_layers(recurrence(24)).classes
    inner = range(3, 21)
    for part in ("at", "sum", "twice", "y"):
        assert len({classes[f"{part}{i}"] for i in inner}) == 1, part
    assert len({classes[f"{part}10"] for part in ("at", "sum", "twice", "y")}) == 4
    assert classes["x"] == "x" and classes["y0"] == "y0"


def test_longer_loops_have_no_more_classes() -> None:
    assert len(set(fold_layers(recurrence(24)).classes.values())) == len(
        set(fold_layers(recurrence(60)).classes.values())
    )


def test_what_is_spelled_out_by_hand_is_no_loop() -> None:
    classes = fold_layers(recurrence(LEAST_STEPS - 1)).classes
    assert all(classes[name] == name for name in classes)


def sums(steps: int) -> Graph:
    """y = (y + y) + x: twice the same type and operation in one step, and nothing else."""
    lines = ['%x: f32[8] = input("x")', '%y0: f32[8] = input("y")']
    for i in range(steps):
        lines += [
            f"%twice{i}: f32[8] = aten.add.Tensor(%y{i}, %y{i})  @scan",
            f"%y{i + 1}: f32[8] = aten.add.Tensor(%twice{i}, %x)  @scan",
        ]
    return Graph.from_text("\n".join(["graph()", *lines, f'return output "0" = %y{steps}', ""]))


def branches(number: int) -> Graph:
    """The sum of so many branches of two equal operations."""
    lines = ['%x: f32[8] = input("x")', '%y0: f32[8] = input("y")']
    for i in range(number):
        lines += [
            f"%a{i}: f32[8] = aten.tanh.default(%x)  @branches",
            f"%b{i}: f32[8] = aten.tanh.default(%a{i})  @branches",
            f"%y{i + 1}: f32[8] = aten.mul.Tensor(%y{i}, %b{i})  @branches",
        ]
    return Graph.from_text("\n".join(["graph()", *lines, f'return output "0" = %y{number}', ""]))


@pytest.mark.parametrize("graph", [sums(LEAST_STEPS - 1), branches(LEAST_STEPS // 2), branches(LEAST_STEPS - 1)])
def test_equal_operations_in_different_places_are_no_steps(graph: Graph) -> None:
    classes = fold_layers(graph).classes
    assert all(classes[name] == name for name in classes)


def test_many_steps_of_equal_operations_are_a_loop() -> None:
    classes = fold_layers(sums(LEAST_STEPS + 8)).classes
    assert classes["y6"] == classes["y16"] != classes["twice6"] == classes["twice16"]


def test_steps_are_tied_within_the_stretches_that_layers_are() -> None:
    classes = fold_layers(recurrence(36), groups=3).classes
    for part in ("at", "sum", "twice", "y"):
        found = [classes[f"{part}{i}"] for i in range(3, 33)]
        assert list(dict.fromkeys(found)) == [key for key, _ in itertools.groupby(found)]
        assert len(set(found)) == 3, part


def test_a_pinned_step_is_free_of_the_others() -> None:
    classes = fold_layers(recurrence(24), apart={"y12": ("pin",)}).classes
    assert [name for name, first in classes.items() if first == "y12"] == ["y12"]


class Recurrence(nn.Module):
    """A recurrence over a sequence, whose steps read a place of it and write another."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, width))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        inputs, state, states = self.mix(x), torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = torch.tanh(state * self.decay + inputs[:, step])
            states.append(state)
        return ((torch.stack(states, 1) - target) ** 2).mean()


def request(steps: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], PlanRequest]:
    torch.manual_seed(0)
    model, batch = Recurrence(), (torch.randn(4, steps, 8), torch.randn(4, steps, 8))
    return model, batch, make_request(model, batch, (2, 2), slow_devices())


@pytest.mark.slow
def test_a_plan_of_a_loop_is_priced_step_by_step_and_computes_what_one_device_does() -> None:
    model, batch, asked = request(20)
    graph = step_graph(asked.graph, asked.loss, asked.batch)
    best, _ = solve_mesh(asked, graph, Timings())
    graph = best.instance.graph
    assert len(best.instance.names) < 0.7 * len(graph.nodes)
    assert best.breakdown.seconds == pytest.approx(best.solution.objective, rel=1e-9)
    inputs = [node.target for node in graph.placeholders("input")]
    values = {**dict(model.named_parameters()), **dict(zip(inputs, batch, strict=True))}
    jobs = (
        Lowering(graph, best.assignment, c, best.prices.path, 256, best.prices.messages)
        for c in itertools.product(range(2), range(2))
    )
    world = World([overlap(lower(job, graph.outputs)) for job in jobs])
    tangents = {node.target: torch.ones(()) for node in graph.placeholders("tangent")}
    results, gradients = world.step({name: value.detach() for name, value in values.items()}, tangents)
    loss, expected = gradients_of(model, batch)
    torch.testing.assert_close(next(iter(results.values())), loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
    chosen = Counter(
        best.assignment.strategies[n.name] for n in graph.nodes if n.op == "aten.tanh.default" and n.phase == "forward"
    )
    assert chosen.most_common(1)[0][1] >= 14
