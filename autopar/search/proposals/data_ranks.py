"""What data ranks add to a stage's placements: each has other samples, and holds its share of the optimizer state.

The program of a microbatch hardly depends on how many data ranks there are, so it is solved without any. Gradients are
then reduced over data ranks once a step, into shards of the stored value, gradient and optimizer state, and new values
are gathered once a step. (Weights that are gathered for every use, and states that are whole for lack of messages, are
left to the search for a plan.) These are the prices of a plan on the mesh (data, ...)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.tensor import Shard

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.node import Node, TensorType
from autopar.ir.placements import PARTIAL_SUM, REPLICATE, Placement, is_valid
from autopar.placement.item_prices import (
    accumulator_bytes,
    optimizer_seconds,
    parameter_bytes,
    working_copy_seconds,
)
from autopar.placement.prices import Prices
from autopar.planner.mesh_solution import MeshSolution


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """What a parameter costs a device: ``static`` bytes of weights, gradients and state; seconds, once a step, of the
    ``reduce`` of its gradient, and of its ``update``, the refresh of working copies included."""

    static: int
    reduce: float
    update: float


def parameter_costs(solution: MeshSolution, data: int, exchanged: int) -> dict[str, ParameterCost]:
    """The cost of each parameter of ``solution``, by the name of its node, if ``data`` ranks have one of its meshes
    each. ``exchanged``: bytes of all unsharded gradients of a step."""
    whole = solution.prices
    options = {kind: (_on_data_axis(kind, data), *inner) for kind, inner in whole.options.items()}
    prices = Prices(whole.cluster, (data, *whole.mesh), options, exchanged, messages=whole.messages)
    return {node.name: _cost(solution, node, prices) for node in solution.instance.graph.placeholders("param")}


def _on_data_axis(kind: TensorType, data: int) -> tuple[Placement, ...]:
    return (REPLICATE, PARTIAL_SUM, *map(Shard, range(kind.rank))) if data > 1 else (REPLICATE,)


def _cost(solution: MeshSolution, node: Node, prices: Prices) -> ParameterCost:
    """The least cost of a parameter, whose state is divided if it can be."""
    every = [_cost_at(solution, node, prices, place) for place in _places(solution, node, prices)]
    return min(every[1:] or every, key=lambda cost: (cost.reduce + cost.update, cost.static))


def _places(solution: MeshSolution, node: Node, prices: Prices) -> Iterator[ParameterPlacement]:
    """Where a parameter may rest: whole on every data rank and, if it is trained, with shards of its state."""
    place, shape = solution.assignment.parameters[node.name], tuple(map(int, node.stored.shape))
    weight = (REPLICATE, *place.weight)
    yield ParameterPlacement(weight, (REPLICATE, *place.gradient), (REPLICATE, *place.optimizer))
    is_divided = prices.mesh[0] > 1 and node.target in solution.instance.graph.gradients
    for dim in range(len(shape)) if is_divided else ():
        state = (Shard(dim), *place.optimizer)
        if is_valid(state, shape, prices.mesh):
            yield ParameterPlacement(weight, state, state)


def _cost_at(solution: MeshSolution, node: Node, prices: Prices, place: ParameterPlacement) -> ParameterCost:
    graph, optimizer = solution.instance.graph, solution.instance.optimizer
    weight, gradient, state = parameter_bytes(prices, node, place, optimizer)
    update, value = working_copy_seconds(prices, node, place), graph.gradients.get(node.target)
    if place.optimizer != place.weight:
        update += prices.table(node.type, sent="bucketed").cost(place.optimizer, place.weight)
    if value is None:
        return ParameterCost(weight, 0.0, update)
    raw = (PARTIAL_SUM if prices.mesh[0] > 1 else REPLICATE, *solution.assignment.placements_of(value))
    reduce = prices.table(graph.type_of(value), sent="bucketed").cost(raw, place.gradient)
    held = gradient + state + accumulator_bytes(prices, node.stored, raw, solution.instance.repeats)
    return ParameterCost(weight + held, reduce, update + optimizer_seconds(prices, node, place, optimizer))
