"""What a plan costs at another batch size, without tracing or solving again.

Shapes of a traced graph are sympy expressions of the batch size, so the same choice of placements can be priced at any
size that divides like the planned one. The solver is not asked: at another size another plan may be better.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.passes.annotate import annotate
from autopar.passes.fold import fold_layers

from .account import account
from .assignment import Assignment
from .cluster import Cluster
from .compiler import Prepared
from .errors import PlanMismatchError
from .graph import Graph
from .instance import build_instance
from .options import Options
from .plan import Plan
from .planner import Answer, Question, Timings, graph_hash, make_plan, step_graph
from .prices import Prices
from .problem import Solution, evaluate
from .refit import refit


def reprice(
    plan: Plan, prepared: Prepared, batch: int, *, cluster: str | Cluster | None = None, options: Options | None = None
) -> Plan:
    """``plan`` as it is at another global ``batch`` size: same choices, new prices.

    ``prepared`` is the model it was made for (:func:`autopar.compiler.prepare`). ``cluster`` and ``options`` (of which
    only the optimizer and the memory limit count) default to the plan's cluster and limit. The result is
    "feasible", its bound is 0 and it lists no baselines: nothing was solved.

    Raises:
        PlanMismatchError: the plan is of another graph, the graph is right only for its own batch size, or this size
            does not divide as the planned one does.
    """
    known = step_graph(prepared.graph, prepared.loss, plan.batch)
    if graph_hash(known) != plan.graph_hash:
        raise PlanMismatchError(
            f"the plan was made for {plan.model!r} (graph {plan.graph_hash}), not for graph {graph_hash(known)}"
        )
    if batch != plan.batch and not (prepared.graph.symbols and prepared.traced.holds_for(batch)):
        raise PlanMismatchError(
            f"the graph was traced at batch {prepared.batch} and is not the same at {batch}: trace the model at {batch}"
        )
    other = annotate(step_graph(prepared.graph, prepared.loss, batch), plan.mesh)
    names = {node.target: node.name for node in known.placeholders("param")}
    assignment = refit(plan.assignment(names), annotate(known, plan.mesh), other)
    settings = options or Options(memory_limit=plan.memory_limit)
    question = Question(
        prepared.graph,
        prepared.loss,
        batch,
        plan.mesh,
        Cluster.get(cluster or plan.cluster),
        settings,
        plan.model,
        plan.axis_names,
    )
    return make_plan(question, other, _answer(question, other, assignment), {}, Timings())


def _answer(question: Question, graph: Graph, assignment: Assignment) -> Answer:
    """The assignment as if it had been solved for; layers are folded only if they all choose alike."""
    prices = Prices.of(question.cluster, question.mesh, graph)
    optimizer = question.options.optimizer
    instance = build_instance(graph, prices, optimizer=optimizer, memory_limit=math.inf)
    folded = build_instance(fold_layers(graph), prices, optimizer=optimizer, memory_limit=math.inf)
    if folded.assignment(folded.chosen(assignment)) == assignment:
        instance = folded
    chosen = np.asarray(instance.chosen(assignment))
    solution = Solution(chosen, evaluate(instance.problem, chosen), 0.0, "feasible", 0.0)
    return Answer(instance, solution, assignment, account(graph, assignment, prices, optimizer))
