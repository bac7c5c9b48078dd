"""Prices a plan at another batch size, without tracing or solving again.

Shapes of a traced graph are sympy expressions of the batch size, so the same placements can be priced at any size that
divides like the planned one. Nothing is solved again: at another size another plan may be better.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
from torch import nn

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError, PlanMismatchError
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats
from autopar.ir.placements import REPLICATE, Placements, Strategy
from autopar.ir.planned_pipeline import PlannedPipeline
from autopar.keywords import suggests
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.microbatch import microbatch, split_inputs
from autopar.passes.recompute.recomputable import recomputable
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.formulation import Instance, build_instance
from autopar.placement.prices import Prices
from autopar.planner.check_strategies import ChunkNodes, nodes_by_mesh
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.options_of_plan import priced_as
from autopar.planner.plan_graph import check_same_graph, compiled_as_planned
from autopar.planner.prepare import Prepared
from autopar.planner.refit import corresponding, refit_plan
from autopar.planner.request import PlanRequest, as_stated, kernels_of, rank_limits
from autopar.planner.step_graphs import graph_alone, pipelined_graph, step_graph
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan
from autopar.plans.plan import Plan
from autopar.solver.problem import Solution, evaluate

from .fitting_schedules import price_schedule
from .rounds import inner_repeats
from .stage_meshes import StageLayout
from .to_plan import staged_plan


@suggests
def reprice(
    plan: Plan, prepared: Prepared, batch: int, *, cluster: str | Cluster | None = None, options: Options | None = None
) -> Plan:
    """``plan`` at another global ``batch`` size: the same choices with new prices.

    ``prepared`` is the model that the plan was made for, traced: what :func:`autopar.planner.prepare.prepare` returns.
    ``cluster`` and ``options`` (only their memory limit, ``optimizer``, ``compile`` and ``imbalance`` matter) default
    to those of the plan, and the precision is the plan's. The result is "feasible", its bound is 0 and it lists no
    baselines, because nothing was solved. A pipeline keeps its cuts, schedule and number of microbatches. Under stages
    of unequal numbers of devices, operations that several stages repeat may be placed anew.

    Raises:
        PlanMismatchError: the plan belongs to another graph, the graph is valid only for its own batch size, or this
            size does not divide as the planned one does.
        OptionsError: the batch does not divide into the plan's microbatches; names the numbers that do. Or ``prepared``
            is not a traced model.
    """
    _check_traced(prepared)
    hardware = Cluster.get(cluster or plan.cluster)
    prepared = compiled_as_planned(prepared, plan, options or Options(), hardware)
    planned = check_same_graph(plan, prepared)
    if batch != plan.batch and not (prepared.graph.symbols and prepared.traced.holds_for(batch)):
        raise PlanMismatchError(
            f"the graph was traced at batch {prepared.batch} and is not the same at {batch}: trace the model at {batch}"
        )
    limit = max(plan.device_limits or plan.stage_limits)
    settings = priced_as(options or Options(memory_limit=limit), plan)
    request = PlanRequest(
        graph=prepared.graph,
        loss=prepared.loss,
        batch=batch,
        mesh=plan.mesh,
        cluster=as_stated(hardware, settings).among(plan.stage_meshes.devices),
        options=settings,
        model=plan.model,
        axis_names=plan.axis_names,
    )
    request = replace(request, rank_limits=rank_limits(request))
    if plan.pipeline is not None:
        return _reprice_staged(plan, plan.pipeline, request)
    other = annotate(step_graph(prepared.graph, prepared.loss, batch), plan.mesh, plan.shares)
    assignment = refit_plan(plan, annotate(planned, plan.mesh, plan.shares), other)
    return make_plan(request, other, _solution_of(request, other, assignment, ONCE), {}, Timings())


def _check_traced(prepared: object) -> None:
    """Raises :class:`OptionsError` for what is not a traced model."""
    if not isinstance(prepared, Prepared):
        what = f"the model {type(prepared).__name__} itself" if isinstance(prepared, nn.Module) else repr(prepared)[:80]
        raise OptionsError(
            f"reprice(plan, prepared, batch) takes a traced model, not {what}: prepared = "
            'autopar.planner.prepare.prepare(model, (), batch, device="cpu", loss_fn=None, precision=plan.precision) '
            "traces one with a batch of keyword inputs"
        )


def _reprice_staged(plan: Plan, pipeline: PlannedPipeline, request: PlanRequest) -> Plan:
    """:func:`reprice` with the same cuts, schedule and number of microbatches. Only the size of microbatches
    changes."""
    count, stages = plan.microbatches, plan.stages
    before, pieces = (
        microbatch(
            pipelined_graph(request.graph, request.loss, batch),
            count,
            split_inputs(request.graph),
            partial(graph_alone, request.graph, request.loss, batch, count) if pipeline.own_statistics else None,
        )
        for batch in (plan.batch, request.batch)
    )
    repeats = inner_repeats(count, stages)
    graphs = SaveActivations()(before.graph), SaveActivations()(pieces.graph)
    sizes = plan.stage_meshes.sizes if pipeline.meshes else ()
    layout = StageLayout(stages, plan.mesh, tuple(range(len(plan.mesh))), sizes)
    parts = list(nodes_by_mesh(plan, cut(before, pipeline.cuts)))
    refitted = {part.chunks: _refitted(plan, _on(plan, request, layout, part), graphs, repeats, part) for part in parts}
    of_chunks = {chunk: refitted[part.chunks] for part in parts for chunk in part.chunks}
    solved = tuple(of_chunks[held[0]] for held in pipeline.schedule.held)
    renamed = corresponding(before.graph, pieces.graph)
    cuts = tuple(renamed[name] for name in pipeline.cuts)
    solution = price_schedule(layout, cut(pieces, cuts), cuts, pipeline.schedule, solved, request.cluster)
    return staged_plan(request, replace(request, repeats=repeats), solution, Timings())


def _on(plan: Plan, request: PlanRequest, layout: StageLayout, part: ChunkNodes) -> PlanRequest:
    """The request for the stages of ``part``; if their mesh is their own, for the devices of the first of them."""
    if not layout.counts:
        return request
    assert plan.pipeline is not None
    block = layout.blocks[plan.pipeline.schedule.placement[part.chunks[0]]]
    return replace(request, mesh=part.mesh, cluster=request.cluster.at(block.start, len(block)))


def _refitted(
    plan: Plan, request: PlanRequest, graphs: tuple[Graph, Graph], repeats: Repeats, part: ChunkNodes
) -> MeshSolution:
    """The plan's choices on one mesh for the first of ``graphs``, with saved activations, carried over to the second.
    What lies on other meshes is whole there."""
    planned, other = (annotate(graph, part.mesh, plan.shares) for graph in graphs)
    if plan.stage_meshes.are_equal:
        return _solution_of(request, other, refit_plan(plan, planned, other), repeats)
    own = refit_plan(plan, planned, other, part.chunks, part.names)
    whole = (REPLICATE,) * len(part.mesh)
    used = {path for paths in part.parameters.values() for path in paths}
    parameters = {
        node.name: own.parameters[node.name] if node.target in used else ParameterPlacement(whole, whole, whole)
        for node in other.placeholders("param")
    }
    strategies = {
        node.name: own.strategies.get(node.name) or min(other.strategies[node.name], key=partial(_divided, whole))
        for node in other.nodes
        if node.op != "param"
    }
    return _solution_of(request, other, replace(own, strategies=strategies, parameters=parameters), repeats)


def _divided(whole: Placements, strategy: Strategy) -> int:
    """How many tensors a strategy does not have whole."""
    return sum(place != whole for place in strategy.places)


def _solution_of(request: PlanRequest, graph: Graph, assignment: Assignment, repeats: Repeats) -> MeshSolution:
    """The assignment as a solution. Layers are folded only if they all make the same choices."""
    prices = Prices.of(request.cluster, request.mesh, graph, kernels_of(request, graph), request.rank_limits)
    optimizer = request.options.optimizer
    kinds = {("optimizer", place.offload) for place in assignment.parameters.values() if place.offload}
    weights = assignment.offloaded & assignment.parameters.keys()
    kinds |= {("activations", "host")} if assignment.offloaded - weights else set()
    kinds |= {("weights", "host")} if weights else set()

    def build(graph: Graph) -> Instance:
        possible = recomputable(graph) if assignment.recomputed else None
        return build_instance(
            graph,
            prices,
            optimizer=optimizer,
            memory_limit=math.inf,
            repeats=repeats,
            recomputable=possible,
            offload=frozenset(kinds),  # type: ignore[arg-type]
        )

    instance, folded = build(graph), build(fold_layers(graph))
    if folded.assignment(folded.chosen(assignment)) == assignment:
        instance = folded
    chosen = np.asarray(instance.chosen(assignment))
    solution = Solution(chosen, evaluate(instance.problem, chosen), 0.0, "feasible", 0.0)
    return MeshSolution.of(instance, solution)
