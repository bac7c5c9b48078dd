"""Whether a plan was made for a graph and for so many devices, and where they part if not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import zip_longest

from autopar.cluster.description import Cluster
from autopar.errors import PlanMismatchError
from autopar.ir.graph import Graph
from autopar.ir.node import RECOMPUTED, SAVED_ACTIVATION, original
from autopar.ir.plan_record import PlanNode
from autopar.ops.random_streams import STREAMED
from autopar.options import Options
from autopar.passes.recompute.compute_again import ANEW
from autopar.passes.recompute.draw_again import AGAIN
from autopar.placement.alternatives import plan_nodes
from autopar.plans.plan import Plan

from .prepare import Prepared
from .request import compiles
from .step_graphs import graph_hash, step_graph


def check_devices(plan: Plan, mesh: tuple[int, ...]) -> None:
    """Raises :class:`PlanMismatchError` if the user's plan is for another number of devices."""
    devices, planned = math.prod(mesh), plan.stage_meshes.devices
    if devices != planned:
        stages = f"{plan.stages} stages of " if plan.stages > 1 else ""
        raise PlanMismatchError(
            f"the plan is for {stages}{plan.stage_meshes} of {planned} devices, but the mesh is {mesh} of {devices}"
        )


def check_same_graph(plan: Plan, base: Prepared) -> Graph:
    """The graph of the model's step at the plan's batch size. Raises :class:`PlanMismatchError`, naming the first
    module and operation that differ, if the plan was made for another."""
    graph = step_graph(base.graph, base.loss, plan.batch)
    actual = graph_hash(graph)
    if actual == plan.graph_hash:
        return graph
    raise PlanMismatchError(
        f"the plan was made for {plan.model!r} (graph {plan.graph_hash}); this model, at batch {plan.batch}, "
        f"has graph {actual}. {first_difference(plan, graph)}. Same configuration, inputs (those given, their shapes "
        "and dtypes, values of flags), loss_fn, mode (train or eval) and operations of torch give the same graph: make "
        "the plan with the inputs of the first training call, or leave plan= out"
    )


def compiled_as_planned(base: Prepared, plan: Plan | None, options: Options, cluster: Cluster) -> Prepared:
    """``base`` for compiled steps (:meth:`.Prepared.for_compiling`) if the plan was made for them; without a plan, if
    the step will be compiled."""
    compiled = compiles(options, cluster) if plan is None else _is_for_compiling(plan.nodes)
    return base.for_compiling() if compiled else base


def _is_for_compiling(nodes: Mapping[str, PlanNode]) -> bool:
    """Whether backward draws or computes something again."""
    drawn = any(AGAIN in name for name, node in nodes.items() if node.op in STREAMED)
    names = (name for name in nodes if name.endswith(ANEW))
    originals = ((name, name.removesuffix(ANEW)) for name in names)
    return drawn or any(one in nodes and nodes[one].op == nodes[name].op for name, one in originals)


def first_difference(plan: Plan, graph: Graph) -> str:
    """A sentence on the first node of ``graph`` that is not the plan's. Where the plan's are of microbatches, other
    operations and inputs come before other sizes."""
    pairs = list(zip_longest(_own(plan.nodes), _own(plan_nodes(graph))))
    for same in (_which, _what) if plan.microbatches > 1 else (_what,):
        for theirs, ours in pairs:
            if theirs is None or ours is None or same(theirs) != same(ours):
                return f"The first difference: the plan has {_describe(theirs)}, this model {_describe(ours)}"
    return (
        "Both have the same operations on the same shapes in the same modules: a number differs, such as a dropout "
        "probability, a scale or an epsilon"
    )


def _own(nodes: Mapping[str, PlanNode]) -> list[PlanNode]:
    """The nodes that the model has, without those that the plan's choices add or leave out."""
    return [n for name, n in nodes.items() if n.op != SAVED_ACTIVATION and not _is_copy(name, nodes)]


def _is_copy(name: str, nodes: Mapping[str, PlanNode]) -> bool:
    """Whether it computes what another node does, for backward or another stage."""
    return name.endswith(RECOMPUTED) or (original(name) != name and original(name) in nodes)


def _which(node: PlanNode) -> tuple[str, ...]:
    return node.op, node.module, node.target


def _what(node: PlanNode) -> tuple[str, ...]:
    return *_which(node), node.type


def _describe(node: PlanNode | None) -> str:
    if node is None:
        return "nothing more"
    if node.target:
        return f"the {node.op} {node.target!r} of {node.type}"
    return f"{node.op} of {node.type}{f' in module {node.module}' if node.module else ''}"
