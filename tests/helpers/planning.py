"""Planning in a test: requests for a model and a batch, their plans, and the plans' programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from autopar.arguments import split_batch
from autopar.cluster.description import Cluster
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.program import Program
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.lower.overlap import overlap
from autopar.placement.breakdown import cost_breakdown
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import BUCKET_BYTES, Prices
from autopar.planner.prepare import Prepared, prepare
from autopar.planner.prepare import make_request as search_request
from autopar.planner.request import PlanRequest, compiles, kernels_of
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.runtime.launch import run_local
from autopar.search.best_plan import best_plan
from tests.helpers.models import Batch, Case, make

CLUSTER = "dgx-a100-80gb"
Work = Callable[[int, int], Any]
Source = str | Callable[[], Case]
"""The name of a model of :mod:`tests.helpers.models`, or what makes a model and its batch."""


def on(count: int, work: Work, timeout: float = 200.0) -> list[Any]:
    """``work(rank, world)`` on ``count`` processes, warnings being errors."""

    def strict(rank: int, world: int) -> Any:
        warnings.simplefilter("error")
        torch.manual_seed(0)
        return work(rank, world)

    return run_local(strict, count, timeout=timeout)


def slow_devices() -> Cluster:
    """Devices so slow that computing is all that counts: plans shard whatever they can."""
    cluster = Cluster.get(CLUSTER)
    device = replace(
        cluster.device, peak_flops={"f32": 1e9}, memory_bandwidth=1e9, launch_seconds=1e-9, view_seconds=1e-10
    )
    return replace(cluster, device=device)


def make_request(
    model: nn.Module, batch: Batch, mesh: tuple[int, ...], cluster: str | Cluster = CLUSTER, **options: Any
) -> PlanRequest:
    """The request :func:`autopar.plan` would make, for just this mesh and without stages."""
    settings = _just_this_mesh(options)
    compiled = compiles(settings, Cluster.get(cluster))
    return _request(_prepare(model, batch, settings.precision, compiled), mesh, cluster, settings)


def _prepare(model: nn.Module, batch: Batch, precision: Any, compiled: bool = False) -> Prepared:
    args, kwargs = split_batch(batch)
    base = prepare(model, args, kwargs, device="cpu", loss_fn=None, training=True, precision=precision)
    return base.for_compiling() if compiled else base


def _request(base: Prepared, mesh: tuple[int, ...], cluster: str | Cluster, settings: Options) -> PlanRequest:
    return PlanRequest(base.graph, base.loss, base.batch, mesh, Cluster.get(cluster), settings)


def _just_this_mesh(options: dict[str, Any]) -> Options:
    return Options(**{"mesh_search": False, "stages": 1, "microbatches": 1, **options})


@cache
def _prepared(source: Source, precision: Any, compiled: bool) -> tuple[nn.Module, Prepared]:
    model, batch = make(source) if isinstance(source, str) else source()
    return model, _prepare(model, batch, precision, compiled)


def requested(source: Source, mesh: tuple[int, ...], cluster: str | Cluster = CLUSTER, **options: Any) -> PlanRequest:
    """:func:`make_request` of a model that is traced once, under each precision, for all requests of all tests."""
    settings = _just_this_mesh(options)
    compiled = compiles(settings, Cluster.get(cluster))
    return _request(_prepared(source, settings.precision, compiled)[1], mesh, cluster, settings)


def planned(source: Source, mesh: tuple[int, ...], cluster: str | Cluster = CLUSTER, **options: Any) -> Plan:
    """:func:`autopar.plan` of a model that is traced as for :func:`requested`."""
    settings = Options(**options)
    model, base = _prepared(source, settings.precision, compiles(settings, Cluster.get(cluster)))
    return best_plan(search_request(model, base, mesh, Cluster.get(cluster), settings), Timings())


@dataclass(frozen=True)
class Setting:
    """A step's annotated graph with its prices."""

    graph: Graph
    prices: Prices

    def program(
        self, assignment: Assignment, coordinate: tuple[int, ...] | None = None, bucket: int = BUCKET_BYTES
    ) -> Program:
        place = coordinate or (0,) * len(assignment.mesh)
        job = Lowering(self.graph, assignment, place, self.prices.path, bucket, self.prices.messages)
        return overlap(lower(job, self.graph.outputs))

    def breakdown(self, assignment: Assignment) -> Any:
        return cost_breakdown(PlacedStep(self.graph, assignment, self.prices, "adamw"))


def setting(request: PlanRequest) -> Setting:
    """The request's step, annotated and priced."""
    graph = annotate(step_graph(request.graph, request.loss, request.batch), request.mesh)
    return Setting(graph, Prices.of(request.cluster, request.mesh, graph, kernels_of(request, graph)))


def gradients_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one plain step."""
    args, kwargs = split_batch(batch)
    output = model(*args, **kwargs)
    loss = output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found
