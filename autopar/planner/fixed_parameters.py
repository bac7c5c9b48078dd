"""Placements for another graph of a model whose parameters are already placed: evaluation, other inputs, a batch that
does not divide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autopar.errors import InfeasibleError
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.ir.placements import Placements
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.recompute.recompute import recomputed
from autopar.placement.choices import Choice, result_place
from autopar.placement.constraints import Allowed, with_choices
from autopar.placement.formulation import Instance, build_instance
from autopar.placement.memory_bound import memory
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import Prices
from autopar.solver.problem import Ints, Solution

from .memory_limit import ROUNDS, may_widen, solve_wide, tightened, widened
from .request import PlanRequest, kernels_of
from .timings import Timings, solve_in_time

Places = Mapping[str, ParameterPlacement]
# Where caches rest, by name.
Resting = Mapping[str, Placements]
NOWHERE: Resting = MappingProxyType({})


def fixed_assignment(
    request: PlanRequest, graph: Graph, parameters: Places, limit: float = math.inf, caches: Resting = NOWHERE
) -> Assignment:
    """The best assignment found for an annotated graph that needs at most ``limit`` bytes. Parameters rest where
    ``parameters`` says, and caches where ``caches`` says; those not named there may rest anywhere. Values are
    recomputed if memory requires it.

    Raises:
        InfeasibleError: no assignment was found that fits.
    """
    prices = Prices.of(request.cluster, request.mesh, graph, kernels_of(request, graph), request.rank_limits)
    instance = build_instance(fold_layers(graph), prices, optimizer=request.options.optimizer, memory_limit=math.inf)
    allowed = _as_placed(parameters, caches)
    plain = with_choices(instance, allowed)
    timings = Timings()

    def run(formulated: Instance, incumbents: Sequence[Ints] = ()) -> Solution:
        return solve_in_time(formulated.problem, request.options, timings, incumbents)

    free = run(plain)
    assignment = _assignment(plain, free, parameters)
    needed = _peak(plain, assignment)
    if needed <= limit:
        return assignment
    if may_widen(request.options, plain):
        tight = replace(plain, problem=replace(plain.problem, memory_limit=limit))
        plain = with_choices(widened(tight, request.options), allowed)
        solution = solve_wide(plain, run, [free.choices])
    else:
        solution = free
    for _ in range(ROUNDS):
        if solution.status == "infeasible":
            break
        assignment = _assignment(plain, solution, parameters)
        needed = _peak(plain, assignment)
        tighter = tightened(plain, solution.choices, needed, limit)
        if tighter is None:
            return assignment
        plain, solution = tighter, run(tighter)
    raise _does_not_fit(graph, needed, limit)


def _as_placed(parameters: Places, caches: Resting) -> Allowed:
    def allowed(node: Node, choice: Choice) -> bool:
        if node.op == "cache" and node.target in caches:
            return result_place(choice, 0) == caches[node.target]
        if not isinstance(choice, ParameterPlacement) or node.target not in parameters:
            return True
        return choice.weight == parameters[node.target].weight

    return allowed


def _assignment(instance: Instance, solution: Solution, parameters: Places) -> Assignment:
    chosen = instance.assignment(solution.choices)
    places = {
        node.name: parameters.get(node.target, chosen.parameters[node.name])
        for node in instance.graph.placeholders("param")
    }
    return replace(chosen, parameters=places)


def _peak(instance: Instance, assignment: Assignment) -> int:
    step = PlacedStep(*recomputed(instance.graph, assignment), instance.prices, instance.optimizer)
    return memory(step).peak


def _does_not_fit(graph: Graph, needed: int, limit: float) -> InfeasibleError:
    shapes = ", ".join(f"{node.target} {node.type}" for node in graph.inputs)
    return InfeasibleError(
        f"a call with ({shapes}) needs {needed} bytes per device with the parameters where the plan has them, more "
        f"than the limit of {limit:.0f}: pass a smaller batch or shorter inputs, or let "
        "parallelize(example_inputs=...) plan for the largest inputs that you will use"
    )
