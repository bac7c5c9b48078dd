"""Compiles the calls of a parallel module: traces, plans once, lowers for this rank, and carries the plan over to other
sizes of inputs.

The first call decides how parameters are placed; every later program keeps these placements. A program with the
operations that were planned, and with sizes that divide in the same way, takes the plan's choices. For any other
(evaluation, further inputs, other values of flags, a last batch that does not divide) the choices are solved anew.
Plans are made on rank 0 and sent to all others, so that ranks cannot disagree where a solver is not deterministic.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.cluster.description import Cluster
from autopar.errors import InfeasibleError, OptionsError, PlanMismatchError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import coordinate_of
from autopar.ir.program import Program
from autopar.options import Options, without_stages
from autopar.passes.recompute.recompute import recomputed
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.memory_bound import memory
from autopar.placement.placed_step import PlacedStep
from autopar.placement.planned_ways import PlannedWays
from autopar.placement.prices import Prices
from autopar.planner.check_strategies import ChunkNodes
from autopar.planner.fixed_parameters import Places, Resting, fixed_assignment
from autopar.planner.plan_graph import check_devices, check_same_graph, compiled_as_planned
from autopar.planner.prepare import LossFunction, Prepared, batch_size, make_request, prepare
from autopar.planner.refit import refit
from autopar.planner.request import PlanRequest
from autopar.planner.step_graphs import bare_step_graph, graph_hash, pipelined_graph, step_graph
from autopar.planner.steps.step_program import step_program
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.progress import shown
from autopar.runtime.calls.compiled import Compiled, Request
from autopar.runtime.comm.groups import AxisGroup
from autopar.trace.lengths import Lengths

from .agreed_plan import messages_of, plan_identity
from .first_call import evaluated_first
from .late_search import proposed_layouts
from .offers import Through, annotated_alike, offers
from .padded_rows import PaddedRows
from .plan_cache import cached_plan
from .rank_zero import gather_objects, on_first_rank, same_on_all_ranks
from .stages import StageCompiler, part_of_cluster
from .traces import Traces, resting_caches

_log = logging.getLogger("autopar.programs")
# What to do where stages are needed.
_NO_STAGES = "A model that is called, not stepped, has no stages: for stages call model.step(...) first"


@dataclass
class Compiler:
    """Compiles requests for the model on this rank; see the module docstring. ``ranks`` are those of the mesh,
    row-major; ``planned_from`` is what the plan was asked for. ``planners``: the ranks of which the first plans for
    all, if these are more; ``finish`` adds to a new plan what the search does not know."""

    model: nn.Module
    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    cluster: Cluster
    options: Options
    device: torch.device
    ranks: AxisGroup
    loss_fn: LossFunction | None = None
    plan: Plan | None = None
    planned_from: PlanRequest | None = None
    planners: AxisGroup | None = None
    finish: Callable[[Plan], Plan] = lambda plan: plan
    _base: Prepared | None = None
    _annotated: dict[int, Graph] = field(default_factory=dict)
    _through: dict[tuple[int, ...], Through] = field(default_factory=dict)
    _source: Compiler | None = None
    _traces: Traces = field(default_factory=Traces)
    _resting: Resting = field(default_factory=dict)

    def copied_for(self, model: nn.Module) -> Compiler:
        """A compiler for ``model``, a copy of this one, under this one's plan, if there is one when the copy is first
        called. Traces are not shared, since the attributes of the copy may change."""
        return replace(self, model=model, _annotated={}, _through={}, _source=self, _traces=Traces())

    def __call__(self, request: Request) -> Compiled:
        source = self._source
        if source is not None and self._base is None:
            self.plan, self._base, self.cluster = source.plan, source._base, source.cluster
        if self.plan is None or self._base is None:
            self._plan_for(request if self._infers else replace(request, training=True))
        base = self._traces.find(self.model, request, self._loss_fn(request), self.ranks)
        base = base or self._at_other_lengths(request) or self._prepare(request, grad=request.grad)
        batch = batch_size(request.args, request.kwargs)
        self._check_padded(request, batch)
        self._resting = resting_caches(base, request)
        if self._base is not None and self._runs_as_planned(request, base, batch):
            with suppress(_Indivisible):
                return self._training_program(request, base, batch)
        return self._other_program(request, base, batch)

    @property
    def _infers(self) -> bool:
        return self.options.mode == "inference"

    def _runs_as_planned(self, request: Request, base: Prepared, batch: int) -> bool:
        if self._infers:  # A prompt runs the operations of one token, and is worth other choices.
            return base is self._base
        return request.grad and request.outputs != "each" and self._carries_over(base, batch)

    def _plan_for(self, request: Request) -> None:
        """Plans training on such inputs, whatever the first call is for: parameters need placements, and training is
        the most demanding use. A model that is called, and not stepped, may be trained by ``backward()``, which plans
        with stages do not support: stages are then chosen only if the options ask for them, or if the call needs no
        gradients and nothing else fits. Prices are rank 0's: with calibration files that differ between hosts, ranks
        would otherwise make different choices."""
        timings = Timings()
        base = self._prepare(request, grad=not self._infers, timings=timings)
        self.cluster = on_first_rank(self.ranks, lambda: self.cluster)
        plan_request = replace(self._plan_request(base), propose=proposed_layouts)
        called = request.outputs != "loss" and not self._infers
        asked = _without_stages(plan_request) if called else plan_request
        self.planned_from = replace(asked, propose=None)

        @shown(f"planning for {math.prod(self.mesh)} devices")
        def make_plan() -> Plan:
            try:
                return cached_plan(asked, timings)
            except (InfeasibleError, OptionsError) as error:
                if not called or (request.grad and isinstance(error, InfeasibleError)):
                    raise
                if request.grad:
                    raise OptionsError(f"{error}\n{_NO_STAGES}") from error
            with evaluated_first(base):
                return cached_plan(plan_request, timings)

        if self.plan is None:
            self.plan = on_first_rank(self.planners or self.ranks, lambda: self.finish(make_plan()))
        else:
            self.planned_from = None
            self.plan.validate()
            self.plan = self.finish(self.plan)
            check_devices(self.plan, self.mesh)
            if not request.grad and not self._infers and self._may_be_for_training(base):
                return
            with evaluated_first(base):
                check_same_graph(self.plan, base)
            if self.plan.pipeline is None:
                self._planned_prices(step_graph(base.graph, base.loss, self.plan.batch))
        self._base = base

    def _may_be_for_training(self, base: Prepared) -> bool:
        """Whether the user's plan, which is not for these inputs, may be for training inputs, which no call has had
        yet: the first training call checks it."""
        assert self.plan is not None
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        is_another = graph_hash(step_graph(base.graph, base.loss, self.plan.batch)) != self.plan.graph_hash
        return is_another and self.plan.pipeline is None and names.issuperset(self.plan.parameters)

    def _plan_request(self, base: Prepared) -> PlanRequest:
        return make_request(self.model, base, self.mesh, self.cluster, self.options, self.axis_names)

    def _prepare(self, request: Request, *, grad: bool, timings: Timings | None = None) -> Prepared:
        """The trace of a call, the same on all ranks. Raises :class:`PlanMismatchError` on every rank if their traces
        differ: ranks that run different programs would wait for each other for ever."""
        base = same_on_all_ranks(
            self.ranks, lambda: self._trace(request, grad, timings), lambda prepared: prepared.graph.to_text()
        )
        self._traces.add(replace(request, grad=grad), base)
        return base

    def _at_other_lengths(self, request: Request) -> Prepared | None:
        """The trace of a call that differs from an earlier one in lengths of its inputs, from a trace in which they are
        open; None if the model fixes them. Collective."""
        everyone = gather_objects(self.ranks, self._traces.lengths(request))
        lengths: Lengths = everyone[0]
        if not lengths or any(own != lengths for own in everyone):
            return None
        if self.ranks.index == 0:
            names = ", ".join(dict.fromkeys(length.input for length in lengths))
            _log.warning("sizes of %s vary: the model is traced again, for all sizes if it allows that", names)
        base = None
        with suppress(Exception):  # The trace of this call alone has the error that says most.
            base = self._trace(request, request.grad, None, lengths)
        if not all(gather_objects(self.ranks, base is not None)):
            self._traces.close(lengths)
            return None
        assert base is not None
        same_on_all_ranks(self.ranks, base.graph.to_text, str)
        self._traces.add(request, base)
        return self._traces.find(self.model, request, self._loss_fn(request), self.ranks)

    def _loss_fn(self, request: Request) -> LossFunction | None:
        """A model that is called, not stepped, does not run ``loss_fn``: its own outputs are differentiated."""
        return self.loss_fn if request.outputs == "loss" else None

    @shown("tracing the model")
    def _trace(self, request: Request, grad: bool, timings: Timings | None, lengths: Lengths = ()) -> Prepared:
        prepared = prepare(
            self.model,
            request.args,
            request.kwargs,
            device=self.device,
            loss_fn=self._loss_fn(request),
            training=request.training,
            grad=grad,
            differentiate="all" if request.outputs == "each" else "loss",
            precision=self.options.precision,
            timings=timings,
            ranks=self.ranks,
            lengths=lengths,
        )
        prepared = compiled_as_planned(prepared, self.plan, self.options, self.cluster)
        return prepared.without_loss() if self._infers else prepared

    def _carries_over(self, base: Prepared, batch: int) -> bool:
        """Whether the plan's choices apply to this trace: it has the same operations on the same parameters."""
        if base is self._base:
            return True
        assert self.plan is not None and self._base is not None
        planned, other = (
            bare_step_graph(b.graph, b.loss, n) for b, n in ((self._base, self.plan.batch), (base, batch))
        )
        return [(n.op, n.is_placeholder and n.op == "param" and n.target) for n in planned.nodes] == [
            (n.op, n.is_placeholder and n.op == "param" and n.target) for n in other.nodes
        ]

    @shown("lowering the step")
    def _training_program(self, request: Request, base: Prepared, batch: int) -> Compiled:
        """The planned step, or the same with other sizes of inputs. Raises :class:`_Indivisible` if the plan's choices
        do not apply to these and the options ask for another program instead of an error. What was planned runs as
        planned, or is an error."""
        assert self._base is not None and self.plan is not None
        is_planned = base is self._base and batch == self.plan.batch
        try:
            if self.plan.pipeline is not None:
                return self._staged_training(request, base, batch)
            return self._whole_training(request, base, batch)
        except (PlanMismatchError, OptionsError) as error:
            if is_planned or self.options.last_batch == "error":
                raise
            raise _Indivisible from error

    def _whole_training(self, request: Request, base: Prepared, batch: int) -> Compiled:
        assert self._base is not None and self.plan is not None
        planned = step_graph(self._base.graph, self._base.loss, self.plan.batch)
        assignment = self.plan.assignment({node.target: node.name for node in planned.placeholders("param")})
        same = base is self._base and batch == self.plan.batch
        if same:
            prices = self._planned_prices(planned)
        else:
            other = self._annotate_alike(step_graph(base.graph, base.loss, batch))
            assignment = refit(assignment, self._annotate(self._base, self.plan.batch), other)
            prices = Prices.of(self.cluster, self.plan.mesh, other, limits=self.plan.device_limits)
            usage = memory(PlacedStep(*recomputed(other, assignment), prices, self.options.optimizer))
            if usage.peak > self.plan.least_limit:
                raise _Indivisible
        symbolic = base.graph if request.outputs == "all" else replace(base.graph, outputs=_loss_outputs(base))
        sizes = {name: batch for name, _ in symbolic.symbols}
        graph = SaveActivations()(symbolic.without_dead().at(**sizes))
        return self._lowered(graph, assignment, prices, base, batch, planned=same)

    @shown("lowering a program")
    def _other_program(self, request: Request, base: Prepared, batch: int) -> Compiled:
        """A program of another kind: solved anew with the placements of parameters fixed."""
        assert self.plan is not None
        loss = base.loss if request.outputs == "loss" else None
        if self.plan.pipeline is not None:
            return self._staged_other(base, loss, batch)
        graph = self._annotate_alike(step_graph(base.graph, loss, batch))
        plan_request = replace(self._plan_request(base), mesh=self.plan.mesh, rank_limits=self.plan.device_limits)
        limited, places, resting = request.grad or self._infers, self.plan.parameters, self._resting
        limit = float(self.plan.least_limit) if limited else math.inf
        assignment = on_first_rank(self.ranks, lambda: fixed_assignment(plan_request, graph, places, limit, resting))
        prices = Prices.of(self.cluster, self.plan.mesh, graph)
        return self._lowered(graph, assignment, prices, base, batch)

    def _staged_training(self, request: Request, base: Prepared, batch: int) -> Compiled:
        """The planned step in microbatches, or the same at another batch size. A call, unlike a step, returns every
        output."""
        assert self.plan is not None and self._base is not None
        planned = pipelined_graph(self._base.graph, self._base.loss, self.plan.batch)
        graph = pipelined_graph(base.graph, None if request.outputs == "all" else base.loss, batch)
        if base is self._base and batch == self.plan.batch:
            stages = self._stages().planned(graph, base.graph, planned)
            return self._as_compiled(stages.program, stages.caches, graph, base, batch, planned=True)
        stages = self._stages().refitted(graph, base.graph, planned, self._base.graph)
        return self._as_compiled(stages.program, stages.caches, graph, base, batch)

    def _staged_other(self, base: Prepared, loss: str | None, batch: int) -> Compiled:
        """Another graph of a model that was planned in stages: evaluation, other inputs, other gradients."""
        assert self.plan is not None and self._base is not None
        planned = pipelined_graph(self._base.graph, self._base.loss, self.plan.batch)
        graph = pipelined_graph(base.graph, loss, batch)
        stages = self._stages().other(graph, base.graph, planned, self._base.graph)
        return self._as_compiled(stages.program, stages.caches, graph, base, batch)

    def _stages(self) -> StageCompiler:
        assert self.plan is not None and self._base is not None
        request, resting = self._plan_request(self._base), self._resting

        def solve(graph: Graph, mesh: tuple[int, ...], places: Places, caches: Collection[str]) -> Assignment:
            inside, kept = replace(request, mesh=mesh), {name: resting[name] for name in caches if name in resting}
            return on_first_rank(self.ranks, lambda: fixed_assignment(inside, graph, places, caches=kept))

        optimizer, index, holds_for = self.options.optimizer, self.ranks.index, self._base.traced.holds_for
        return StageCompiler(
            self.plan, self.cluster, optimizer, index, self._annotate_alike, self._planned_prices, solve, holds_for
        )

    def _check_padded(self, request: Request, batch: int) -> None:
        """Refuses to pad a step: its loss is computed from all rows, so padding would change it."""
        assert self.plan is not None
        if self.options.last_batch == "pad" and request.outputs == "loss" and request.grad and batch < self.plan.batch:
            raise PlanMismatchError(
                f'last_batch="pad": this step has {batch} rows, the plan has {self.plan.batch}, and padding '
                "rows would count in the loss: call out = model(...) and backward() of a loss of its outputs, or use "
                'Options(last_batch="replicate"), which makes a program for the smaller batch'
            )

    def _as_compiled(
        self,
        program: Program | PipelineProgram,
        caches: Resting,
        graph: Graph,
        base: Prepared,
        batch: int,
        *,
        planned: bool = False,
    ) -> Compiled:
        assert self.plan is not None
        order = program.schedule if isinstance(program, PipelineProgram) else messages_of(program)
        text = f"{plan_identity(self.plan)}{graph.to_text()}{order}{torch.__version__}"
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        padding = None
        if self.options.last_batch == "pad" and batch == self.plan.batch:
            padding = PaddedRows(base.graph, batch, base.traced.holds_for, self.ranks)
        traced = base.traced
        return Compiled(program, traced.signature, self.plan, fingerprint, traced.reads, planned, padding, caches)

    def _annotate(self, base: Prepared, batch: int) -> Graph:
        assert self.plan is not None
        if batch not in self._annotated:
            self._annotated[batch] = self._annotate_alike(step_graph(base.graph, base.loss, batch))
        return self._annotated[batch]

    def _planned_prices(self, graph: Graph, part: ChunkNodes | None = None, bare: Graph | None = None) -> Prices:
        """Prices of the ``graph`` that was planned (or of which ``bare`` was), checked by :func:`offers`, on the mesh
        of a ``part`` of stages. Reshards take the ways that were priced, whatever they cost here."""
        assert self.plan is not None
        mesh, key = (part.mesh, part.chunks) if part else (self.plan.mesh, ())
        if key not in self._through:
            annotated = partial(self._annotate_alike, mesh=mesh)
            self._through[key] = offers(self.plan, bare or graph, annotated, self.ranks, part)
        prices = Prices.of(part_of_cluster(self.plan, self.cluster, part), mesh, graph, options=self._through[key])
        return replace(prices, ways=PlannedWays.of(self.plan, mesh, key))

    def _annotate_alike(self, graph: Graph, mesh: tuple[int, ...] | None = None) -> Graph:
        assert self.plan is not None
        return annotated_alike(graph, mesh or self.plan.mesh, self.ranks, self.plan.shares)

    def _lowered(
        self,
        graph: Graph,
        assignment: Assignment,
        prices: Prices,
        base: Prepared,
        batch: int,
        *,
        planned: bool = False,
    ) -> Compiled:
        assert self.plan is not None
        graph, assignment = recomputed(graph, assignment)
        program = step_program(graph, assignment, prices, coordinate_of(self.ranks.index, self.plan.mesh))
        return self._as_compiled(program, assignment.resting(graph), graph, base, batch, planned=planned)


def _loss_outputs(base: Prepared) -> tuple[Any, ...]:
    return tuple(o for o in base.graph.outputs if o.kind != "output" or base.loss is None or o.name == base.loss)


class _Indivisible(Exception):
    """The plan's choices do not apply to inputs of these sizes, or do not fit into memory."""


def _without_stages(request: PlanRequest) -> PlanRequest:
    return replace(request, options=without_stages(request.options))
