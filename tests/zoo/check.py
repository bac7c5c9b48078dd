"""Runs a model's graph under any assignment, all ranks in one process, and compares with the whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.cluster.description import Cluster
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, TensorType, map_arg
from autopar.ir.placements import Shares, Strategy
from autopar.ir.program import Program
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.lower.overlap import overlap
from autopar.passes.normalise.standard import normalise
from autopar.placement.parameter_choices import parameter_choices
from autopar.placement.prices import Prices
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.trace.tracer import trace
from autopar.verification.widths import converted, default_dtype, in_width, insisting
from tests.helpers.eager_draws import STATE, eager_draws
from tests.helpers.interpret import interpret
from tests.helpers.lowering import plain
from tests.helpers.simulate import World

Narrowed = Callable[[random.Random, tuple[Strategy, ...]], tuple[Strategy, ...]]
Results = dict[tuple[str, str], torch.Tensor | None]


@dataclass
class Case:
    """A model's step graph in float64, the values of its placeholders, and what it computes on one device."""

    graph: Graph
    values: dict[str, torch.Tensor]
    expected: Results


@default_dtype(torch.float64)  # Rounding cannot hide an error.
def make_case(model: nn.Module, batch: Any) -> Case:
    """Traces a model; asserts that its graph gives the loss and gradients of the model itself."""
    torch.manual_seed(0)
    if hasattr(model, "set_experts_implementation") and hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # Grouped products have no kernel for float64; the loop has.
    model, batch = model._apply(converted).train(), pytree.tree_map(converted, batch)  # double() leaves complex buffers
    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
    with insisting():
        traced = trace(model, args, kwargs, device="cpu")
    batch_size = next(iter(dict(traced.graph.symbols).values()), 0)
    graph = widened(step_graph(normalise(traced.graph), traced.signature.loss, batch_size))
    leaves = pytree.tree_leaves((args, kwargs))
    inputs = dict(zip(traced.signature.input_names, leaves, strict=True))
    values = {n: v.detach().clone() for n, v in (*model.named_parameters(), *model.named_buffers())}
    values |= {name: value for name, value in inputs.items() if name is not None}
    values["random"] = STATE
    torch.manual_seed(0)
    case = Case(graph, values, interpret(plain(graph), values))
    _check_trace(case, model, args, kwargs, traced.signature.loss)
    return case


def widened(graph: Graph) -> Graph:
    """The graph with float64 wherever something insists on fewer bits: decompositions, casts of mixed precision."""

    def leaf(arg: Arg) -> Arg:
        return in_width(arg) if isinstance(arg, torch.dtype) else arg

    def visit(node: Node) -> Node:
        types = tuple(kind and TensorType(kind.shape, in_width(kind.dtype)) for kind in node.types)
        kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in node.kwargs)
        return replace(node, args=map_arg(node.args, leaf), kwargs=kwargs, types=types)

    constants = {name: tensor.to(in_width(tensor.dtype)) for name, tensor in graph.constants.items()}
    return replace(graph, nodes=tuple(map(visit, graph.nodes)), constants=constants)


def _check_trace(case: Case, model: nn.Module, args: Any, kwargs: Any, loss: str | None) -> None:
    torch.manual_seed(0)
    with eager_draws(), insisting():
        output = model(*args, **kwargs)
    flat = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.ndim == 0 and t.requires_grad]
    value = getattr(output, "loss", None)
    value = flat[0] if value is None else value
    assert loss is not None
    value.backward()
    compare({("output", loss): value.detach()}, {("output", loss): case.expected["output", loss]}, "trace", 1e-8)
    for name, parameter in model.named_parameters():
        found, eager = case.expected.get(("gradient", name)), parameter.grad
        if eager is None and found is not None:
            eager = torch.zeros_like(found)  # An expert nobody chose: the graph has zeros.
        assert (found is None) == (eager is None), name
        compare({("gradient", name): eager}, {("gradient", name): found}, "trace", 1e-8)
    for name, buffer in model.named_buffers():
        compare(
            {("mutation", name): buffer}, {("mutation", name): case.expected.get(("mutation", name))}, "trace", 1e-8
        )


def compare(found: Mapping[tuple[str, str], Any], expected: Results, message: str, tolerance: float = 1e-8) -> None:
    """Asserts equality relative to the largest element of each result."""
    for key, value in expected.items():
        if value is None:
            continue
        other = found[key]
        scale = max(1e-3, float(value.double().abs().nan_to_num().max())) if value.numel() else 1.0
        torch.testing.assert_close(
            other.double(),
            value.double(),
            rtol=0,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda m, k=key: f"{message}: {k}: {m}",
        )


def random_assignment(graph: Graph, mesh: tuple[int, ...], seed: int, narrowed: Narrowed | None = None) -> Assignment:
    """Any strategy for every node, any resting places for every parameter: what a planner could choose. ``narrowed``
    leaves some of the strategies of a node to choose from."""
    generator = random.Random(seed)
    parameters, strategies = {}, {}
    for node in graph.nodes:
        offered = graph.strategies[node.name]
        if node.op == "param":
            parameters[node.name] = generator.choice(parameter_choices(offered, True))
        else:
            strategies[node.name] = generator.choice(narrowed(generator, offered) if narrowed else offered)
    return Assignment(mesh, strategies, parameters)


def programs(graph: Graph, assignment: Assignment, prices: Prices, bucket: int = 256) -> list[Program]:
    """What every rank runs, ranks in row-major order."""
    coordinates = product(*map(range, assignment.mesh))
    return [
        overlap(lower(Lowering(graph, assignment, c, prices.path, bucket, prices.messages), graph.outputs))
        for c in coordinates
    ]


def prices_for(annotated: Graph, mesh: tuple[int, ...]) -> Prices:
    return Prices.of(Cluster.get("dgx-a100-80gb"), mesh, annotated)


def check_assignments(case: Case, mesh: tuple[int, ...], seeds: range, shares: Shares = ()) -> None:
    """Random assignments of the graph on a mesh all give what one device gives."""
    annotated = annotate(case.graph, mesh, shares)
    prices = prices_for(annotated, mesh)
    for seed in seeds:
        check_assignment(case, annotated, random_assignment(annotated, mesh, seed), prices, f"mesh {mesh}, seed {seed}")


KINDS = ("best", "zero", "compute", "both")


def check_plans(case: Case, mesh: tuple[int, ...], kinds: Iterable[str] = KINDS) -> dict[str, Assignment]:
    """Solved assignments (best, fully sharded, best where only compute costs, both) give what one device gives."""
    annotated = annotate(case.graph, mesh)
    found = {}
    for name in kinds:
        cluster, options = _configurations()[name]
        request = PlanRequest(case.graph, None, 6, mesh, cluster, options)
        solved, _ = solve_mesh(request, case.graph, Timings())
        prices = Prices.of(cluster, mesh, annotated)
        check_assignment(case, solved.instance.graph, solved.assignment, prices, f"mesh {mesh}, {name}")
        found[name] = solved.assignment
    return found


def _configurations() -> dict[str, tuple[Cluster, Options]]:
    fast = Cluster.get("dgx-a100-80gb")
    slow = compute_bound(fast)
    return {
        "best": (fast, Options()),
        "zero": (fast, Options(zero=3)),
        "compute": (slow, Options()),
        "both": (slow, Options(zero=3)),
    }


def compute_bound(cluster: Cluster) -> Cluster:
    """``cluster`` with devices so slow that only dividing the work counts, and small products as quick per FLOP as
    large ones: plans then shard what they can."""
    device = replace(
        cluster.device,
        peak_flops={"f32": 1e9, "f64": 1e9},
        memory_bandwidth=1e9,
        launch_seconds=1e-9,
        view_seconds=1e-10,
        processors=0,
        matmul_padding=0.0,
    )
    return replace(cluster, device=device)


def tangents(graph: Graph) -> dict[str, torch.Tensor]:
    """Ones for every tangent."""
    return {
        n.target: torch.ones([int(s) for s in n.type.shape], dtype=n.type.dtype) for n in graph.placeholders("tangent")
    }


@default_dtype(torch.float64)  # Rounding cannot hide an error.
def check_assignment(case: Case, annotated: Graph, assignment: Assignment, prices: Prices, message: str) -> None:
    """One assignment gives what one device gives."""
    torch.manual_seed(0)
    results, gradients = World(programs(annotated, assignment, prices)).step(case.values, tangents(annotated))
    found = dict(_keyed(case, results, gradients))
    compare(found, case.expected, message)


def _keyed(
    case: Case, results: Mapping[str, Any], gradients: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, str], Any]]:
    for kind, name in case.expected:
        known = gradients if kind in ("gradient", "input_gradient") else results
        if name in known:
            yield (kind, name), known[name]
