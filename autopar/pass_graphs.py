"""The graph of a training step after each pass, from the trace to the program of one rank: to see what a pass did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from torch import nn

from autopar.cluster.description import Cluster
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.module_paths import did_you_mean
from autopar.ir.placements import coordinate_of
from autopar.ir.program import Program
from autopar.passes.annotate.annotate import annotate
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.lower.lower import Lowering, lower, with_native_operations
from autopar.passes.lower.overlap import overlap
from autopar.passes.normalise.scaled_loss import ScaledLoss
from autopar.passes.normalise.standard import STANDARD
from autopar.passes.recompute.compute_again import ComputeAgain
from autopar.passes.recompute.draw_again import DrawAgain, draw_again
from autopar.passes.recompute.recompute import recomputed
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.constraints import by_first_names, pinned_apart
from autopar.placement.prices import BUCKET_BYTES, Prices
from autopar.planner.plan_graph import compiled_as_planned
from autopar.planner.prepare import Prepared, prepare
from autopar.planner.step_graphs import bare_step_graph
from autopar.plans.plan import Plan

from .arguments import Batch, split_batch
from .errors import OptionsError
from .options import Options
from .precision import Precision, scales_loss

# In the order in which they run. Those of PLACED need a plan without stages: a pipeline is cut first.
PLACED = ("recompute", "native", "lower", "overlap")
PASSES = (
    "trace",
    *dict.fromkeys(one.name for one in STANDARD),
    ScaledLoss.name,
    DrawAgain.name,
    ComputeAgain.name,
    "step",
    SaveActivations.name,
    "annotate",
    "fold",
    *PLACED,
)


def after_pass(
    model: nn.Module, batch: Batch, name: str, *, plan: Plan, cluster: str | Cluster | None, rank: int = 0
) -> str:
    """The text of the graph of ``plan``'s step after the pass ``name`` (one of :data:`PASSES`); after ``"lower"``, of
    the program of ``rank``. A pass that runs several times is meant the last time.

    Raises:
        OptionsError: there is no such pass, or it does not run under this plan.
    """
    if name not in PASSES:
        hint = did_you_mean(name, PASSES)
        raise OptionsError(f"there is no pass {name!r}{hint or ';'} in their order: {', '.join(PASSES)}")
    if name == ScaledLoss.name and not scales_loss(plan.precision):
        raise OptionsError(f"{name} runs under fp16 alone, and this plan is in {plan.precision}: give --precision fp16")
    if name in PLACED and plan.pipeline is not None:
        raise OptionsError(
            f"{name} runs on each chunk of a pipeline, and this plan has {plan.stages} stages: ask for a pass up to "
            "fold, or plan with --stages 1"
        )
    args, kwargs = split_batch(batch)
    precision: Precision | None = plan.precision if plan.precision != "fp32" else None
    base = prepare(model, args, kwargs, device="cpu", loss_fn=None, training=True, precision=precision)
    known = Cluster.get(cluster or "local")
    planned = compiled_as_planned(base, plan, Options(), known)
    return _Graphs(base.graph, planned, plan, known, rank).text(name)


class _Graphs:
    """The graphs of one step; each is made from the one before it."""

    def __init__(self, normalised: Graph, base: Prepared, plan: Plan, cluster: Cluster, rank: int) -> None:
        self.normalised, self.base, self.plan, self.cluster, self.rank = normalised, base, plan, cluster, rank

    def text(self, name: str) -> str:
        later: Mapping[str, Callable[[], Graph | Program]] = {
            "step": lambda: self.step,
            SaveActivations.name: lambda: self.saved,
            "annotate": lambda: annotate(self.saved, self.plan.mesh, self.plan.shares),
            "fold": lambda: fold_layers(
                self.saved, apart=pinned_apart(self.saved, by_first_names(self.plan.pinned, self.plan.tied))
            ),
            "recompute": lambda: self.recomputed[0],
            "native": lambda: with_native_operations(self.job).graph,
            "lower": lambda: lower(self.job, self.job.graph.outputs),
            "overlap": lambda: overlap(lower(self.job, self.job.graph.outputs)),
        }
        found = later[name]() if name in later else self._normalised(name)
        return found.to_text(annotated=True) if isinstance(found, Graph) else str(found)

    def _normalised(self, name: str) -> Graph:
        """The graph of the model, for any batch size, after the last pass called ``name``; traced, if none is."""
        graph = self.base.traced.graph
        if name == DrawAgain.name and self.base.compiled:
            return draw_again(self.normalised)
        if name in (ScaledLoss.name, DrawAgain.name, ComputeAgain.name):  # The last two are for compiled steps alone.
            return self.normalised if name == ScaledLoss.name else self.base.graph
        last = max((i for i, one in enumerate(STANDARD) if one.name == name), default=-1)
        for one in STANDARD[: last + 1]:
            graph = one(graph)
        return graph

    @cached_property
    def step(self) -> Graph:
        return bare_step_graph(self.base.graph, self.base.loss, self.plan.batch)

    @cached_property
    def saved(self) -> Graph:
        return SaveActivations()(self.step)

    @cached_property
    def recomputed(self) -> tuple[Graph, Assignment]:
        names = {node.target: node.name for node in self.saved.placeholders("param")}
        return recomputed(self.saved, self.plan.assignment(names))

    @cached_property
    def job(self) -> Lowering:
        graph, assignment = self.recomputed
        prices = Prices.of(self.cluster, self.plan.mesh, annotate(self.saved, self.plan.mesh, self.plan.shares))
        coordinate = coordinate_of(self.rank, self.plan.mesh)
        return Lowering(graph, assignment, coordinate, prices.path, BUCKET_BYTES, prices.messages)
