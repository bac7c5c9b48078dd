"""Runs a plan that somebody gives, compiled as ``parallelize(plan=...)`` does, all ranks simulated in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.cluster.description import Cluster
from autopar.compiler.calls import Compiler, Prepared, prepare
from autopar.ir.pipeline_program import PipelineProgram
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.planner.plan_graph import compiled_as_planned
from autopar.plans.plan import Plan
from autopar.runtime.calls.compiled import Request
from autopar.runtime.comm.groups import AxisGroup
from tests.helpers.simulate import World
from tests.helpers.simulate_pipeline import Pipeline


@dataclass
class Bench:
    """One model and batch, traced once, on which plans are run."""

    model: nn.Module
    batch: dict[str, Any]
    cluster: str = "dgx-a100-80gb"
    _prepared: Prepared | None = None
    _annotated: dict[Any, Any] = field(default_factory=dict)

    def expected(self) -> dict[str, torch.Tensor]:
        """Loss and gradients of one process."""
        self.model.zero_grad()
        loss = self.model(**self.batch)
        loss.backward()
        gradients = {n: p.grad.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **gradients}

    def run(self, plan: Plan) -> dict[str, torch.Tensor]:
        """Loss and gradients under ``plan``. Raises what compiling it raises."""
        programs = self.programs(plan)
        if isinstance(programs[0], PipelineProgram):
            found = Pipeline(programs, self._values()).step()
            return {("loss" if kind == "output" else name): value for (kind, name), value in found.items()}
        tangents = {slot.target: torch.ones(()) for slot in programs[0].tangents}
        results, gradients = World(programs).step(self._values(), tangents)
        loss = next(iter(results.values()))
        return {"loss": loss, **self._by_path(programs[0], gradients)}

    def programs(self, plan: Plan) -> list[Any]:
        """The program of each rank under ``plan``. Raises what compiling it raises."""
        count = plan.stage_meshes.devices
        return [self._compiled(plan, rank, count) for rank in range(count)]

    def _by_path(self, program: Any, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {slot.target: gradients[slot.name] for slot in program.gradients}

    def _values(self) -> dict[str, torch.Tensor]:
        named = {name: p.detach() for name, p in self.model.named_parameters()}
        return {**named, **dict(self.model.named_buffers()), **self.batch}

    def _compiled(self, plan: Plan, rank: int, count: int) -> Any:
        one = Compiler(
            model=self.model,
            mesh=(count,),
            axis_names=(),
            cluster=Cluster.get(self.cluster),
            options=Options(),
            device=torch.device("cpu"),
            # A group of one: nothing is agreed upon, each rank compiles by itself.
            ranks=AxisGroup(None, 1, rank),
            plan=plan,
        )
        request = Request((), self.batch, training=True, grad=True, outputs="loss")

        def prepare_as_planned(request: Request, *, grad: bool, timings: Any = None) -> Prepared:
            base = self._prepare(request, grad=grad, timings=timings)
            return compiled_as_planned(base, plan, Options(), one.cluster)

        one._prepare = prepare_as_planned  # type: ignore[method-assign]
        one._annotate_alike = self._annotate(plan)  # type: ignore[method-assign]
        return one(request).program

    def _prepare(self, request: Request, *, grad: bool, timings: Any = None) -> Prepared:
        if self._prepared is None:
            self._prepared = prepare(self.model, (), self.batch, device="cpu", loss_fn=None, training=True, grad=True)
        return self._prepared

    def _annotate(self, plan: Plan) -> Any:
        """Rules are found once for each graph and mesh."""

        def annotated(graph: Any, mesh: tuple[int, ...] | None = None) -> Any:
            key = (graph.to_text(), mesh or plan.mesh, plan.shares)
            if key not in self._annotated:
                self._annotated[key] = annotate(graph, mesh or plan.mesh, plan.shares)
            return self._annotated[key]

        return annotated
