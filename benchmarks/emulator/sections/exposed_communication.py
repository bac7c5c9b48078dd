"""Exposed communication of a layout's tensor and context ranks, for its cost breakdown and its placement program.

A collective of backward overlaps a product of as many FLOPs (Korthikanti et al. 2022, section 4.2.2). While the
gradient of an input is summed over tensor ranks, the weight's gradient is computed; while an operand that forward saved
in shards is gathered again, the input's gradient is computed. The exposed seconds depend on one placement at a time, so
the program has them as prices:

    waited(computing, seconds) = seconds - min((1 - taken) seconds, computing)

The cost breakdown knows the placements under which products compute, and which products read the gathered operand. The
program does not: it assumes the quickest placements of a product that fit the ends of the collective, and all products
that may read the gathered operand. Once a first solution is known its prices are exact, and the program is solved again
with them if the first prices were far off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import compress, product

import numpy as np
from torch.distributed.tensor import Partial

from autopar.cost import family_of
from autopar.cost.kernels.kernel import is_heavy, origin
from autopar.cost.overlap import taken_by_messages, waited
from autopar.ir.graph import Graph
from autopar.ir.node import VIEWS, Node, Value
from autopar.ir.placements import REPLICATE, Placements, Strategy, is_shard
from autopar.placement.axis_names import weight_values
from autopar.placement.choices import OUTPUTS, Choice, operand_place, result_place
from autopar.placement.edge_costs import breaks_kernel
from autopar.placement.edges import TensorEdge
from autopar.placement.formulation import Instance
from autopar.planner.roles.expert_blocks import OPERATIONS
from autopar.solver.problem import Floats, Ints, Transfer
from benchmarks.emulator.stored import TENSOR


def overlapped_products(
    graph: Graph, value: Value, source: Placements, target: Placements, readers: Iterable[Node]
) -> list[Node]:
    """The products that run while ``value`` is resharded in backward, if any. ``readers``: all operations that read it
    as ``target``. Where these are products (the weights' gradients of query, key and value), as many products compute
    the input's gradient meanwhile."""
    if source[TENSOR] == target[TENSOR]:
        return []
    if isinstance(source[TENSOR], Partial):
        return list(_products(graph, value))
    return list(filter(is_heavy, readers)) if _is_saved(graph, value) else []


def _is_saved(graph: Graph, value: Value) -> bool:
    """Whether backward gets a value from forward."""
    producer = graph[origin(graph, value).node]
    return producer.phase == "forward" and not producer.is_placeholder


def _products(graph: Graph, value: Value) -> Iterator[Node]:
    """The products that a value is the sum of."""
    node = graph[value.node]
    if node.op in VIEWS or node.op.startswith("aten.add."):
        for operand in node.operands:
            yield from _products(graph, operand)
    elif family_of(node.op).matrix is not None:
        yield node


def with_exposed_prices(instance: Instance, hides: bool, chosen: Ints | None = None) -> Instance:
    """The instance with the prices of the cost breakdown. Collectives of backward cost their exposed seconds where a
    layout ``hides`` them. Reductions of weights' gradients are free, since they are part of the step's reductions over
    data ranks. Weights are never communicated, since a layout divides them once and for all. ``chosen``: a solution,
    which says how operations read values."""
    weights, transfers = weight_values(instance.graph), list(instance.problem.transfers)
    for index, edge in enumerate(instance.edges):
        transfer = transfers[index]
        if edge.role == "gradient":
            cost = _reweighed(instance, edge, transfer, _summed_once)
        elif edge.producer in weights:
            cost = _reweighed(instance, edge, transfer, _sliced_only)
        elif edge.role == "backward" and hides:
            cost = _exposed(instance, edge, transfer, chosen)
        else:
            continue
        transfers[index] = replace(transfer, cost=cost)
    # Overlap windows hide communication of weights and their gradients, which is not part of a microbatch.
    return replace(instance, problem=replace(instance.problem, transfers=tuple(transfers), windows=()))


def scattering(instance: Instance) -> Instance:
    """The instance in which sums of products are reduce-scattered and never all-reduced. With sequence parallelism all
    values between products are in shards, even where a hidden all-reduce would be exposed for less time than the gather
    after a scatter."""
    transfers = list(instance.problem.transfers)
    for index, edge in enumerate(instance.edges):
        if edge.role != "gradient" and any(_products(instance.graph, Value(edge.producer, edge.result))):
            transfers[index] = replace(transfers[index], cost=_reweighed(instance, edge, transfers[index], _scattered))
    return replace(instance, problem=replace(instance.problem, transfers=tuple(transfers)))


Reweigh = Callable[[Placements, Placements, float], float]


def _reweighed(instance: Instance, edge: TensorEdge, transfer: Transfer, reweigh: Reweigh) -> Floats:
    rows, columns = _ends(instance, edge, transfer)
    cost = transfer.cost.copy()
    for (p, source), (q, target) in product(enumerate(rows), enumerate(columns)):
        if source is not None and target is not None and np.isfinite(cost[p, q]):
            cost[p, q] = reweigh(source, target, float(cost[p, q]))
    return cost


def _ends(instance: Instance, edge: TensorEdge, transfer: Transfer) -> tuple[list[Placements | None], ...]:
    """The placements of the rows and of the columns of a transfer."""
    rows: list[Placements | None] = [None] * transfer.cost.shape[0]
    columns: list[Placements | None] = [None] * transfer.cost.shape[1]
    for choice, row in zip(instance.choices[transfer.producer], transfer.source, strict=True):
        rows[int(row)] = result_place(choice, edge.result)
    for (_, operand), group, target in zip(edge.consumers, transfer.consumers, transfer.targets, strict=True):
        for choice, column in zip(instance.choices[group], target, strict=True):
            columns[int(column)] = operand_place(choice, operand)
    return rows, columns


def _sliced_only(source: Placements, target: Placements, seconds: float) -> float:
    """Forbids all reshards of weights except slices of replicated ones."""
    here = all(start in (end, REPLICATE) for start, end in zip(source, target, strict=True))
    return seconds if here else float("inf")


def _scattered(source: Placements, target: Placements, seconds: float) -> float:
    return float("inf") if isinstance(source[TENSOR], Partial) and target[TENSOR] == REPLICATE else seconds


def _summed_once(source: Placements, target: Placements, seconds: float) -> float:
    """Gradients of weights replicated on tensor ranks are summed once a step, at no price here; those of shards are
    computed in place."""
    start, end = source[TENSOR], target[TENSOR]
    if start == end or (isinstance(start, Partial) and end == REPLICATE):
        return 0.0
    return float("inf") if is_shard(end) and start != REPLICATE else seconds


def _exposed(instance: Instance, edge: TensorEdge, transfer: Transfer, chosen: Ints | None) -> Floats:
    """The exposed seconds of a value's reshards in backward."""
    graph, value = instance.graph, Value(edge.producer, edge.result)
    rows, columns = _ends(instance, edge, transfer)
    is_saved = _is_saved(graph, value)
    overlaps = [row is not None and (is_saved or isinstance(row[TENSOR], Partial)) for row in rows]
    if not any(overlaps):
        return transfer.cost
    kind, taken = graph.type_of(value), taken_by_messages(instance.prices.cluster)
    seconds, breaks = instance.prices.table(kind).cost, breaks_kernel(edge, instance.prices.fused)
    readers, quickest = partial(_readers, instance, edge, chosen, {}), partial(_quickest, instance, value, {})
    cost, finite = transfer.cost.copy(), np.isfinite(transfer.cost)
    for (p, source), (q, target) in product(enumerate(rows), enumerate(columns)):
        if source is None or target is None or source == target or not overlaps[p] or not finite[p, q]:
            continue
        nodes = overlapped_products(graph, value, source, target, readers(target))
        computing = sum(quickest(node, source, target) for node in nodes)
        full = seconds(source, target) if computing else 0.0
        if full:
            broken = instance.prices.broken(kind, source, target) if breaks else 0.0
            cost[p, q] *= (waited(computing, full, taken) + broken) / (full + broken)
    return cost


def _readers(
    instance: Instance, edge: TensorEdge, chosen: Ints | None, known: dict[Placements, list[Node]], target: Placements
) -> Iterator[Node]:
    """The operations that read the value as ``target``, or all that may if none does. They are found when the first is
    asked for, and kept in ``known``."""

    def reading(choices_of: Callable[[str], Iterable[Choice]]) -> list[Node]:
        return [
            instance.graph[name]
            for name, operand in edge.consumers
            if name != OUTPUTS and any(operand_place(choice, operand) == target for choice in choices_of(name))
        ]

    def choice_of(name: str) -> list[Choice]:
        group = instance.group_of(name)
        return [] if chosen is None else [instance.choices[group][int(chosen[group])]]

    if target not in known:
        known[target] = reading(choice_of) or reading(lambda name: _offered(instance, name))
    yield from known[target]


def _offered(instance: Instance, name: str) -> Iterator[Choice]:
    """The choices of an operation that have a finite cost."""
    group = instance.group_of(name)
    finite = np.isfinite(instance.problem.groups[group].cost)
    return compress(instance.choices[group], finite.tolist())


def _quickest(
    instance: Instance,
    value: Value,
    known: dict[tuple[str, object], float],
    node: Node,
    source: Placements,
    target: Placements,
) -> float:
    """Seconds of a product while ``value`` is resharded, under the quickest of its strategies that fit: it reads the
    value as the target, or its result is a part of the sum. Kept in ``known``."""
    if node.op in OPERATIONS:
        return 0.0
    index = node.operands.index(value) if value in node.operands else None
    key = node.name, source[TENSOR] if index is None else target
    if key not in known:
        kinds = tuple(map(instance.graph.type_of, node.operands))
        offered = (choice for choice in _offered(instance, node.name) if isinstance(choice, Strategy))
        fitting = (c for c in offered if (c.outputs[0][TENSOR] if index is None else c.inputs[index]) == key[1])
        known[key] = min((instance.prices.node(node, kinds, choice) for choice in fitting), default=0.0)
    return known[key]
