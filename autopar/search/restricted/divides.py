"""Checks, before anything is solved, that the degrees of a layout divide the model that they restrict."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.module_paths import layers_among, outermost_layer
from autopar.layout import divisors
from autopar.planner.request import PlanRequest
from autopar.planner.roles.divides import (
    check_matrices,
    check_sequences,
    check_tensor,
    divided_by_tensor,
)
from autopar.planner.roles.expert_blocks import expert_blocks
from autopar.planner.roles.products import Products
from autopar.planner.step_graphs import bare_step_graph
from autopar.restriction import Restriction, words_of


def check_layout_divides(request: PlanRequest, restriction: Restriction) -> None:
    """Raises :class:`OptionsError` if heads, experts, weights or the sequence do not divide among the ranks that
    ``restriction`` gives them, or if there are no experts to divide or no sequence."""
    graph = _step(request)
    tensor, context = restriction.tensor or 1, restriction.context or 1
    words = words_of(request.options.layout)
    check_sequences(graph, context, words)
    check_tensor(divided_by_tensor(graph), tensor, words)
    if tensor > 1 and not request.cluster.groups:  # Unequal devices may divide what equal ones cannot.
        check_matrices(graph, _products(request).parameters, tensor, words)
    if (restriction.expert or 1) > 1:
        _check_experts(graph, restriction.expert or 1, tensor)
    needs_sequence = {"context": context > 1, "sequence_parallel": bool(restriction.sequence_parallel)}
    for name, needed in needs_sequence.items():
        if needed and not any(node.type.rank > 1 for node in graph.placeholders("input")):
            shapes = ", ".join(f"{node.target} {node.type}" for node in graph.placeholders("input"))
            raise OptionsError(
                f"Layout({name}={getattr(restriction, name)}): no input has a sequence, which would be its dim 1 "
                f"({shapes}); leave {name} out"
            )


def check_stages_divide(request: PlanRequest) -> None:
    """Raises :class:`OptionsError` if the layout of ``request`` asks for more stages than the model has products with
    weights: cuts need not be between layers, but some stages would have nothing that a degree counts."""
    restriction = Restriction.of(request.options.layout)
    stages, whole = restriction.pipeline or 1, request.graph
    if stages == 1:
        return
    products = _products(request)
    count = sum(products.graph[name].phase == "forward" for name in products.names)
    if stages > count:
        others = math.prod(n or 1 for n in (restriction.data, restriction.context, restriction.tensor))
        devices, names = math.prod(request.mesh), ("data", "context", "tensor")
        works = max(n for n in divisors(_left(devices, others)) if n <= max(count, 1))
        on = works * others if all(getattr(restriction, name) is not None for name in names) else devices
        raise OptionsError(
            f"{words_of(request.options.layout)}: {stages} stages divide the model's products with weights, and it has "
            f"{count} of them{_in_layers(whole)}; pipeline={works} on {on} device{'s' * (on > 1)} would do"
        )


def _step(request: PlanRequest) -> Graph:
    whole, loss, batch = request.graph, request.loss, request.batch
    make = partial(bare_step_graph, whole, loss, batch)
    return request.shared.once("bare step", (whole,), loss, batch, make=make)


def _products(request: PlanRequest) -> Products:
    """The operations of a step that read matrices or tables of weights."""
    make = partial(Products, _step(request), axes=0, batch_dims={})
    return request.shared.once("products of a step", (request.graph,), request.loss, request.batch, make=make)


def _in_layers(graph: Graph) -> str:
    """How many layers each stack of a model has, in words: its numbered containers, outermost ones."""
    layers = layers_among(node.module for node in graph.nodes)
    outer = dict.fromkeys(outermost_layer(node.module, layers) for node in graph.nodes)
    stacks = Counter(layer.rpartition(".")[0] for layer in outer if layer)
    counts = (f"{n} layer{'s' * (n > 1)}{path and f' of {path!r}'}" for path, n in stacks.items())
    return f", in {' and '.join(counts)}" if stacks else ""


def _left(devices: int, others: int) -> int:
    """The devices that other degrees leave for one; all of them, if these do not divide them."""
    return devices // others if devices % others == 0 else devices


def _check_experts(graph: Graph, expert: int, tensor: int) -> None:
    blocks = expert_blocks(graph)
    if not blocks:
        raise OptionsError(
            f"Layout(expert={expert}): the model has no block of experts that can be divided (transformers' mixtures "
            "are; loops over modules, and weights of all experts in products of your own, are not: "
            "docs/howto/experts.md); leave expert out, or take expert=1"
        )
    for node, count in blocks.items():
        if count % (expert * tensor):
            among = f"{expert} expert ranks" + (f" x {tensor} tensor ranks" if tensor > 1 else "")
            raise OptionsError(
                f"Layout(expert={expert}): {node.module or node.name} has {count} experts, which do not divide among "
                f"{among}"
            )
