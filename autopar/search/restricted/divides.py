"""Checks, before anything is solved, that the degrees of a layout divide the model that they restrict."""

from __future__ import annotations

import math

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.layout import Layout, degrees
from autopar.planner.request import PlanRequest
from autopar.planner.roles.divides import check_division
from autopar.planner.roles.expert_blocks import expert_blocks
from autopar.planner.step_graphs import bare_step_graph
from autopar.restriction import Restriction, words_of


def check_layout_divides(request: PlanRequest, restriction: Restriction) -> None:
    """Raises :class:`OptionsError` if heads, experts or the sequence do not divide among the ranks that ``restriction``
    gives them, or if there are no experts to divide or no sequence."""
    graph = bare_step_graph(request.graph, request.loss, request.batch)
    tensor, context = restriction.tensor or 1, restriction.context or 1
    words = words_of(request.options.layout)
    devices = math.prod(request.mesh)
    others = math.prod(n or 1 for n in (restriction.pipeline, restriction.data, restriction.context))
    check_division(graph, Layout(tensor=tensor, context=context), words, ranks=_left(devices, others), devices=devices)
    if (restriction.expert or 1) > 1:
        among = _left(devices, tensor * (restriction.pipeline or 1))
        _check_experts(graph, restriction.expert or 1, tensor, among)
    needs_sequence = {"context": context > 1, "sequence_parallel": bool(restriction.sequence_parallel)}
    for name, needed in needs_sequence.items():
        if needed and not any(node.type.rank > 1 for node in graph.placeholders("input")):
            shapes = ", ".join(f"{node.target} {node.type}" for node in graph.placeholders("input"))
            raise OptionsError(
                f"Layout({name}={getattr(restriction, name)}): no input has a sequence, which would be its dim 1 "
                f"({shapes}); leave {name} out"
            )


def _left(devices: int, others: int) -> int:
    """The devices that other degrees leave for one; all of them, if these do not divide them."""
    return devices // others if devices % others == 0 else devices


def _check_experts(graph: Graph, expert: int, tensor: int, ranks: int) -> None:
    """``ranks``: those of data and context, of which experts take some."""
    blocks = expert_blocks(graph)
    if not blocks:
        raise OptionsError(
            f"Layout(expert={expert}): the model has no block of experts that can be divided (transformers' mixtures "
            "are; loops over modules are not); leave expert out, or take expert=1"
        )
    for node, count in blocks.items():
        if count % (expert * tensor):
            among = f"{expert} expert ranks" + (f" x {tensor} tensor ranks" if tensor > 1 else "")
            works = math.gcd(count // math.gcd(count, tensor), ranks)
            raise OptionsError(
                f"Layout(expert={expert}): {node.module or node.name} has {count} experts, which do not divide among "
                f"{among}; {degrees('expert', works, expert)}"
            )
