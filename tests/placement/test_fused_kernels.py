"""Prices of compiled steps: kernels as the sum of their shares, and objectives that are the sum of all lines."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost.kernels.share import DRAWN_FLOPS
from autopar.ir.assignment import operand_uses
from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.placements import REPLICATE, Strategy
from autopar.placement.breakdown import cost_breakdown
from autopar.placement.fused_kernels import FusedKernels
from autopar.placement.prices import Prices
from autopar.planner.mesh_solution import placed_step
from autopar.planner.request import is_compiled
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.search.best_plan import best_plan
from autopar.solver.problem import evaluate
from tests.helpers.marks import slow_rows_but
from tests.helpers.planning import CLUSTER, requested, slow_devices

GPU, CPU = Cluster.get(CLUSTER), Cluster.get("local")
MIB = 1 << 20
# A norm, its gradient, and the gradient of its weight; every large value has 4 MiB.
NORM = """graph()
    %x: f32[1024, 1024] = input("x")
    %w: f32[1024] = param("w")
    %square: f32[1024, 1024] = aten.mul.Tensor(%x, %x)
    %mean: f32[1024, 1] = aten.mean.dim(%square, [1], True)
    %scale: f32[1024, 1] = aten.rsqrt.default(%mean)
    %normal: f32[1024, 1024] = aten.mul.Tensor(%x, %scale)
    %y: f32[1024, 1024] = aten.mul.Tensor(%normal, %w)
    %columns: f32[1024] = aten.sum.dim_IntList(%normal, [0])
    return output "0" = %y
    return output "1" = %columns
    """


def priced(text: str, cluster: Cluster) -> tuple[Graph, Prices, dict[str, float]]:
    """A graph on one device, and the seconds of its operations."""
    graph = Graph.from_text(text)
    prices = Prices(cluster, (1,), {}, 0, fused=FusedKernels.of(graph, cluster.device))
    whole = (REPLICATE,)
    nodes = [node for node in graph.nodes if not node.is_placeholder]
    seconds = {
        node.name: prices.node(
            node,
            tuple(map(graph.type_of, node.operands)),
            Strategy((whole,) * len(node.operands), (whole,) * len(node.types)),
        )
        for node in nodes
    }
    return graph, prices, seconds


def test_a_kernel_reads_and_writes_each_value_once_and_is_launched_once() -> None:
    text = """graph()
        %x: f32[1024, 1024] = input("x")
        %a: f32[1024, 1024] = aten.neg.default(%x)
        %b: f32[1024, 1024] = aten.mul.Tensor(%a, %x)
        %c: f32[1024, 1024] = aten.add.Tensor(%a, %b)
        return output "0" = %c
        """
    _, _, seconds = priced(text, GPU)
    device = GPU.device
    traffic = 8 * MIB / device.memory_bandwidth
    assert sum(seconds.values()) == pytest.approx(device.launch_seconds + traffic)


def test_reductions_across_rows_share_kernels_on_gpus_alone() -> None:
    graph = Graph.from_text(NORM)
    moved = {}
    for cluster in (GPU, CPU):
        kernels = FusedKernels.of(graph, cluster.device).kernels.kernels
        moved[cluster.name] = [
            sum(int(graph.type_of(v).bytes) for v in (*kernel.reads, *kernel.writes)) // MIB for kernel in kernels
        ]
    assert moved[GPU.name] == [8]
    # The columns are summed by another kernel, which computes the rest again, or from what the first one writes.
    assert sorted(moved[CPU.name]) == [4, 8]


def test_shares_of_kernels_are_their_bytes() -> None:
    for cluster in (GPU, CPU):
        graph = Graph.from_text(NORM)
        fused = FusedKernels.of(graph, cluster.device)
        for kernel in fused.kernels.kernels:
            shares = [fused.shares[node.name] for node in kernel.nodes]
            assert sum(share.launches for share in shares) == pytest.approx(1.0)
            counted = sum(
                part * int(graph.type_of(value).bytes)
                for node, share in zip(kernel.nodes, shares, strict=True)
                for values, parts in (
                    (node.operands, share.reads),
                    ([Value(node.name, i) for i in range(len(node.types))], share.writes),
                )
                for value, part in zip(values, parts, strict=True)
            )
            assert counted == sum(int(graph.type_of(value).bytes) for value in (*kernel.reads, *kernel.writes))


def test_an_operation_of_backward_among_those_of_forward_ends_no_kernel() -> None:
    """Such as a view of a saved value, which traces have where its module was left."""
    text = """graph()
        %x: f32[1024, 1024] = input("x")
        %a: f32[1024, 1024] = aten.neg.default(%x)  @norm
        %s: f32[1024, 1024] = autopar.saved(%a)  @norm
        backward %v: f32[1048576] = aten.reshape.default(%s, [1048576])  @norm
        %b: f32[1024, 1024] = aten.mul.Tensor(%a, %x)  @norm
        backward %g: f32[1048576] = aten.neg.default(%v)  @norm
        return output "0" = %b
        return gradient "w" = %g
        """
    kernels = FusedKernels.of(Graph.from_text(text), GPU.device).kernels.kernels
    assert [[node.name for node in kernel.nodes] for kernel in kernels] == [["a", "b"], ["g"]]


NORMS = """graph()
    %x: f32[1024, 1024] = input("x")
    %w: f32[1024] = param("w")
    %b: f32[1024] = param("b")
    %d: f32[1024, 1024] = tangent("0")
    %s: f32[1024, 1024] = autopar.saved(%x)
    %n: f32[1024, 1024], %n.1: f32[1024, 1], %n.2: f32[1024, 1] = aten.native_layer_norm.default(%s, [1024], %w, %b, 1e-5)
    %m: f32[1024, 1] = autopar.saved(%n.1)
    %i: f32[1024, 1] = autopar.saved(%n.2)
    backward %f: f32[1024, 1024] = aten.neg.default(%d)
    backward %g: f32[1024, 1024], %g.1: f32[1024], %g.2: f32[1024] = aten.native_layer_norm_backward.default(%f, %s, [1024], %m, %i, %w, %b, [True, True, True])
    return output "0" = %n
    return input_gradient "x" = %g
    return gradient "w" = %g.1
    return gradient "b" = %g.2
    """  # noqa: E501


def test_sums_of_a_norms_gradient_are_a_kernel_of_their_own_on_cpus() -> None:
    """It computes the gradient that the norm is given again, and reads the norm's operand again."""
    graph = Graph.from_text(NORMS)
    moved = {}
    for cluster in (GPU, CPU):
        fused = FusedKernels.of(graph, cluster.device)
        sizes = [
            sum(int(fused.kernels.graph.type_of(v).bytes) for v in (*kernel.reads, *kernel.writes)) // MIB
            for kernel in fused.kernels.kernels
            if kernel.phase == "backward"
        ]
        share = fused.shares["g"]
        moved[cluster.name] = sorted(sizes), share.reads[1], share.writes
        assert fused.shares["f"].launches + share.launches == pytest.approx(len(sizes))
    assert moved == {GPU.name: ([12], 1.0, (1.0, 1.0, 1.0)), CPU.name: ([8, 12], 2.0, (1.0, 1.0, 1.0))}


def test_what_reads_joined_tensors_is_another_kernel_on_cpus() -> None:
    text = """graph()
        %x: f32[512, 1024] = input("x")
        %a: f32[512, 1024] = aten.neg.default(%x)
        %c: f32[1024, 1024] = aten.cat.default([%a, %x])
        %y: f32[1024, 1024] = aten.neg.default(%c)
        return output "0" = %y
        """
    graph = Graph.from_text(text)
    found = [[len(k.nodes) for k in FusedKernels.of(graph, one.device).kernels.kernels] for one in (GPU, CPU)]
    assert found == [[3], [2, 1]]


def test_a_bias_is_part_of_its_product() -> None:
    text = """graph()
        %x: f32[64, 32] = input("x")
        %w: f32[32, 16] = param("w")
        %b: f32[16] = param("b")
        %p: f32[64, 16] = aten.mm.default(%x, %w)
        %y: f32[64, 16] = aten.add.Tensor(%p, %b)
        %z: f32[64, 16] = aten.relu.default(%y)
        return output "0" = %z
        """
    _, prices, seconds = priced(text, GPU)
    assert seconds["y"] == 0.0
    assert seconds["z"] > GPU.device.launch_seconds
    assert prices.fused is not None and prices.fused.is_inside(Value("p"), ("y",))
    assert not prices.fused.is_inside(Value("y"), ("z",))


def test_what_is_compiled_is_priced_so() -> None:
    asked = {(name, how): requested("plain", (2,), name, compile=how) for name in (CLUSTER, "local") for how in _HOW}
    compiled = {key: is_compiled(request) for key, request in asked.items()}
    assert compiled == {
        (name, how): how is True or (how == "auto" and name == CLUSTER) for name in (CLUSTER, "local") for how in _HOW
    }
    plain, fused = (best_plan(asked["local", how], Timings()) for how in (False, True))
    assert fused.predicted.compute_seconds < plain.predicted.compute_seconds
    assert best_plan(asked["local", "auto"], Timings()).predicted == plain.predicted


_HOW = ("auto", True, False)
CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("stack", (2, 2), {}),
    ("gpt2", (2, 2), {}),
    ("gpt2", (2,), {"recompute": "full"}),
    ("llama", (2, 2), {"zero": 3}),
    ("resnet", (4,), {"precision": "bf16"}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), slow_rows_but([0], CASES), ids=str)
def test_objectives_are_the_sum_of_lines_whatever_is_chosen(
    name: str, mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Also far from the best plan, where reshards are inside kernels."""
    request = requested(name, mesh, slow_devices(), compile=True, **options)
    solved, _ = solve_mesh(request, step_graph(request.graph, request.loss, request.batch), Timings())
    instance, chosen, draw = solved.instance, solved.solution.choices.copy(), random.Random(0)
    assert instance.prices.fused is not None
    broken = 0
    for count in range(300):
        group = draw.randrange(len(instance.choices))
        other = chosen.copy()
        other[group] = draw.randrange(len(instance.choices[group]))
        before, after = (instance.choices[group][int(each[group])] for each in (chosen, other))
        # What is recomputed though nothing needs it is not run, but costs the program what it takes.
        if type(before) is type(after) and math.isfinite(evaluate(instance.problem, other)):
            chosen = other
        if count % 50 == 0:
            broken += _check(instance, chosen)
    assert broken > 0


def _check(instance: Any, chosen: np.ndarray[Any, Any]) -> int:
    """How many reshards are inside kernels."""
    step = placed_step(instance, instance.assignment(chosen))
    assert cost_breakdown(step).seconds == pytest.approx(evaluate(instance.problem, chosen), rel=1e-9)
    uses = (use for node in step.graph.nodes for use in operand_uses(step.graph, step.assignment, node))
    fused = instance.prices.fused
    return sum(use.source != use.target and fused.is_inside(use.value, (use.consumer,)) for use in uses)


def test_prices_operation_by_operation_are_as_before() -> None:
    request = requested("stack", (2, 2), "local", compile=False)
    solved, _ = solve_mesh(request, step_graph(request.graph, request.loss, request.batch), Timings())
    assert solved.prices.fused is None
    fused = replace(solved.prices, fused=FusedKernels.of(solved.instance.graph, CPU.device), _calls={}, _nodes={})
    for node in solved.instance.graph.nodes:
        if not node.is_placeholder and node.name in solved.assignment.strategies:
            kinds = tuple(map(solved.instance.graph.type_of, node.operands))
            strategy = solved.assignment.strategies[node.name]
            assert fused.uncompiled.node(node, kinds, strategy) == solved.prices.node(node, kinds, strategy)


DROPOUT = """graph()
    %random: i64[4] = random("random")
    %x: f32[1024, 1024] = input("x")
    %m: b8[1024, 1024] = autopar.bernoulli.default(%random, [1024, 1024], 0.9, dtype=torch.bool, device=device("cpu"))
    %k: f32[1024, 1024] = aten._to_copy.default(%m, dtype=torch.float32)
    %y: f32[1024, 1024] = aten.mul.Tensor(%x, %k)
    return output "0" = %y
    """


@pytest.mark.parametrize("bandwidth", [1e10, 1e13])
def test_draws_are_inside_of_kernels_and_their_arithmetic_counts_where_traffic_does_not_hide_it(
    bandwidth: float,
) -> None:
    device = replace(GPU.device, memory_bandwidth=bandwidth)
    _, prices, seconds = priced(DROPOUT, replace(GPU, device=device))
    assert prices.fused is not None and len(prices.fused.kernels.kernels) == 1
    traffic, arithmetic = 8 * MIB / bandwidth, DRAWN_FLOPS * MIB / device.flops(torch.float32)
    expected = device.launch_seconds + max(traffic, arithmetic)
    assert sum(seconds.values()) == pytest.approx(expected, rel=1e-4)  # The state has 32 bytes.


def test_a_draw_with_nothing_beside_it_is_an_operation_of_its_own() -> None:
    alone = DROPOUT.replace('return output "0" = %y', 'return output "0" = %m')
    _, _, seconds = priced(Graph.from_text(alone).without_dead().to_text(), GPU)
    assert seconds["m"] > 128 * MIB / GPU.device.memory_bandwidth
