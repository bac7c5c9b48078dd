"""Planning in a test: a model and a batch become a question, the answer, and its programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from autopar.account import account
from autopar.api import split_batch
from autopar.assignment import Assignment
from autopar.cluster import Cluster
from autopar.compiler import prepare
from autopar.graph import Graph
from autopar.options import Options
from autopar.passes.annotate import annotate
from autopar.passes.lower import Lowering, lower
from autopar.passes.overlap import overlap
from autopar.placed_step import PlacedStep
from autopar.prices import BUCKET_BYTES, Prices
from autopar.program import Program
from autopar.question import Question
from autopar.runtime.launch import run_local
from autopar.step_graphs import step_graph
from tests.models import Batch, make

CLUSTER = "dgx-a100-80gb"
Work = Callable[[int, int], Any]


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


def ask(
    model: nn.Module, batch: Batch, mesh: tuple[int, ...], cluster: str | Cluster = CLUSTER, **options: Any
) -> Question:
    """The question :func:`autopar.plan` would ask, for just this mesh and without stages."""
    args, kwargs = split_batch(batch)
    settings = _just_this_mesh(options)
    base = prepare(model, args, kwargs, device="cpu", loss_fn=None, training=True, precision=settings.precision)
    return Question(base.graph, base.loss, base.batch, mesh, Cluster.get(cluster), settings)


def _just_this_mesh(options: dict[str, Any]) -> Options:
    return Options(**{"mesh_search": False, "stages": 1, "microbatches": 1, **options})


@cache
def _traced(name: str) -> Question:
    return ask(*make(name), (1,))


def asked(name: str, mesh: tuple[int, ...], cluster: str | Cluster = CLUSTER, **options: Any) -> Question:
    """:func:`ask` of a model of :mod:`tests.models` in fp32, which is traced once for all questions."""
    return replace(_traced(name), mesh=mesh, cluster=Cluster.get(cluster), options=_just_this_mesh(options))


@dataclass(frozen=True)
class Setting:
    """A step's annotated graph with its prices."""

    graph: Graph
    prices: Prices

    def program(
        self, assignment: Assignment, coordinate: tuple[int, ...] | None = None, bucket: int = BUCKET_BYTES
    ) -> Program:
        place = coordinate or (0,) * len(assignment.mesh)
        job = Lowering(self.graph, assignment, place, self.prices.path, bucket)
        return overlap(lower(job, self.graph.outputs))

    def bill(self, assignment: Assignment) -> Any:
        return account(PlacedStep(self.graph, assignment, self.prices, "adamw"))


def setting(question: Question) -> Setting:
    """The question's step, annotated and priced."""
    graph = annotate(step_graph(question.graph, question.loss, question.batch), question.mesh)
    return Setting(graph, Prices.of(question.cluster, question.mesh, graph))


def gradients_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one plain step."""
    args, kwargs = split_batch(batch)
    output = model(*args, **kwargs)
    loss = output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found
