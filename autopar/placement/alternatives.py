"""The parts of an instance that a plan records for ``why``, ``diff`` and tables: its nodes, the tensors resident in
memory, and the alternatives to each choice.

The price of an alternative is the objective when one group's choice is changed and all others stay. It is computed from
the group's own cost and the transfers that it takes part in, for all its choices at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from autopar.ir.assignment import ParameterPlacement, WeightInHost
from autopar.ir.graph import Graph
from autopar.ir.node import DTYPE_NAMES, SAVED_ACTIVATION, Node
from autopar.ir.placements import short
from autopar.ir.plan_record import Alternative, Alternatives, PlanNode, ResidentTensor
from autopar.offload import IN_TIER
from autopar.solver.problem import Floats, Ints, Problem, Transfer, Window, sides_of

from .choices import Choice
from .constraints import module_outputs
from .formulation import Instance
from .memory_bound import held_bytes, rests_on_device
from .placed_step import PlacedStep

# Alternatives recorded of each choice, the cheapest. Chosen: enough to say why, in a plan file that stays small.
KEPT = 6


def explanation_fields(instance: Instance, graph: Graph, chosen: Ints) -> dict[str, Any]:
    """The fields of a :class:`~autopar.plans.plan.Plan` that :meth:`~autopar.plans.plan.Plan.why` and similar methods
    read. ``chosen``: the choice of each group; ``graph``: that of ``instance`` with the nodes that are recomputed.
    """
    gradients = {path: str(value).removeprefix("%") for path, value in graph.gradients.items()}
    return {
        "nodes": plan_nodes(graph),
        "module_nodes": module_outputs(graph),
        "gradient_values": gradients,
        "alternatives": alternatives(instance, chosen),
    }


def plan_nodes(graph: Graph) -> dict[str, PlanNode]:
    """A record of each node of ``graph``, by name."""
    nodes, texts = dict[str, PlanNode](), dict[tuple[int, ...], str]()
    for node in graph.nodes:
        own = tuple(map(id, node.types))
        if own not in texts:
            texts[own] = ", ".join(str(kind) for kind in node.types if kind is not None)
        first = graph.classes.get(node.name, node.name)
        nodes[node.name] = PlanNode(
            op=node.op,
            type=texts[own] + _stored(node),
            module=node.module,
            target=node.target if node.is_placeholder else "",
            operands=tuple(dict.fromkeys(value.node for value in node.operands)),
            tied="" if first == node.name else first,
        )
    return nodes


def _stored(node: Node) -> str:
    """The stored type of a parameter as text, if it differs from its own."""
    stored_differently = node.op == "param" and node.stored != node.type
    return f", stored {DTYPE_NAMES[node.stored.dtype]}" if stored_differently else ""


def holdings(step: PlacedStep) -> Iterator[ResidentTensor]:
    """The tensors whose bytes :func:`autopar.placement.memory_bound.memory` adds up."""
    for node in step.graph.nodes:
        if node.op == "param":
            parts = zip(("weight", "gradient", "optimizer"), held_bytes(step, node), strict=True)
            module = node.target.rpartition(".")[0]
            yield from (ResidentTensor(kind, node.name, module, count) for kind, count in parts if count)
        elif node.is_placeholder or rests_on_device(step, node):
            place = step.assignment.strategies[node.name].outputs[0]
            count = step.prices.held(node.type, place)
            is_activation = node.op in (SAVED_ACTIVATION, "receive")
            resident = count * (step.repeats.in_flight if is_activation else step.repeats.copies_of(node.op))
            yield ResidentTensor("activation" if is_activation else "input", node.name, node.module, resident)


def alternatives(instance: Instance, chosen: Ints, most: int = KEPT) -> dict[str, Alternatives]:
    """For each group with more than one choice, by its node, at most ``most`` alternatives, the cheapest first."""
    problem = instance.problem
    touching: defaultdict[int, list[Transfer]] = defaultdict(list)
    for transfer in problem.transfers:
        for group in {transfer.producer, *transfer.consumers}:
            touching[group].append(transfer)
    return {
        name: _cheapest(instance, group, prices_alone(problem, touching[group], group, chosen), chosen, most)
        for group, name in enumerate(instance.names)
        if len(instance.choices[group]) > 1
    }


def prices_alone(problem: Problem, transfers: list[Transfer], group: int, chosen: Ints) -> Floats:
    """The terms of the objective in which ``group`` takes part, in seconds, shape [K], for each of its choices."""
    total = problem.groups[group].cost.copy()
    moved = {id(transfer): _moves(transfer, group, chosen, len(total)) for transfer in transfers}
    for seconds in moved.values():
        total += seconds
    for window in problem.windows:
        total -= window.hidden * _overlapped(problem, window, moved, group, chosen)
    return total


def _overlapped(problem: Problem, window: Window, moved: Mapping[int, Floats], group: int, chosen: Ints) -> Floats:
    """Seconds, shape [K], for which computation and messages of a window overlap, for each choice of ``group``."""
    messages, computing = sides_of(problem, window, chosen)
    now, sent = int(chosen[group]), np.zeros(len(problem.groups[group].cost))
    for index, part in window.transfers.items():
        sent += part * moved.get(id(problem.transfers[index]), 0.0)
    own = window.groups.get(group, 0.0) * problem.groups[group].cost if group in window.groups else np.zeros(len(sent))
    possible = np.isfinite(sent) & np.isfinite(own)
    sides = messages + np.where(possible, sent - sent[now], 0.0), computing + np.where(possible, own - own[now], 0.0)
    return np.where(possible, np.minimum(*sides), 0.0)


def _moves(transfer: Transfer, group: int, chosen: Ints, count: int) -> Floats:
    """Seconds of one transfer for each choice of ``group``. Every distinct column counts once, as in
    :func:`autopar.solver.problem.evaluate`.
    """
    rows = transfer.source if transfer.producer == group else transfer.source[chosen[transfer.producer]]
    pairs = list(zip(transfer.consumers, transfer.targets, strict=True))
    paid = sorted({int(target[chosen[consumer]]) for consumer, target in pairs if consumer != group})
    own = [target for consumer, target in pairs if consumer == group]
    seconds = np.zeros(count)
    if paid:
        seconds += transfer.cost[:, paid].sum(axis=1)[rows]
    for position, columns in enumerate(own):
        is_new = ~np.isin(columns, paid)
        for earlier in own[:position]:
            is_new &= columns != earlier
        seconds += np.where(is_new, transfer.cost[rows, columns], 0.0)
    return seconds


def _cheapest(instance: Instance, group: int, seconds: Floats, chosen: Ints, most: int) -> Alternatives:
    now, memory = int(chosen[group]), instance.problem.groups[group].memory
    possible = np.isfinite(seconds)
    possible[now] = False
    order = [int(k) for k in np.argsort(seconds, kind="stable") if possible[k]]
    cheapest = tuple(
        Alternative(
            choice_text(instance.choices[group][k]), float(seconds[k] - seconds[now]), int(memory[k] - memory[now])
        )
        for k in order[:most]
    )
    return Alternatives(cheapest, len(order), len(seconds) - 1 - len(order))


def choice_text(choice: Choice) -> str:
    """A choice as text for people: ``(R,S(0)) (S(0),R) -> (S(0),R)``, or the resting places of a parameter."""
    if not isinstance(choice, ParameterPlacement):
        return str(choice)
    weight, gradient, optimizer = map(short, (choice.weight, choice.gradient, choice.optimizer))
    host = f" {IN_TIER[choice.offload]}" if choice.offload else ""
    away = f" {IN_TIER['host']}" if isinstance(choice, WeightInHost) else ""
    if weight == gradient == optimizer:
        return weight + (f", weight{away}" if away else "") + (", optimizer state" + host if host else "")
    return f"weight {weight}{away}, gradient {gradient}, optimizer {optimizer}{host}"
