"""Answers the calls of a parallel module: traces, plans once, lowers for this rank, and carries the plan over to other
batch sizes.

The first call decides where parameters rest; every later program (another batch size, evaluation, all outputs) keeps
them there. Plans are made on rank 0 and sent to all others, so that a solver's whim cannot make ranks disagree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.passes.annotate import annotate, needs_finding
from autopar.passes.found_rules import KNOWN, Known
from autopar.passes.lower import Lowering, lower
from autopar.passes.normalise import normalise
from autopar.passes.overlap import overlap
from autopar.passes.recompute import recomputed
from autopar.passes.rest import InsertRests
from autopar.passes.scaled_loss import with_scaled_loss
from autopar.runtime.compiled import Compiled, Request
from autopar.runtime.groups import AxisGroup

from .agreed_plan import plan_identity
from .assignment import Assignment
from .cluster import Cluster
from .compile_stages import StageCompiler, check_memory
from .errors import PlanMismatchError
from .first_rank import on_first_rank
from .fixed_parameters import fixed_assignment
from .graph import Dim, Graph
from .options import Options, without_stages
from .pipeline import PipelineProgram
from .placed_step import PlacedStep
from .plan import Plan
from .plan_cache import answered
from .plan_offers import check_offered
from .precision import Precision, autocast_dtype, check_precision, scales_loss
from .prices import BUCKET_BYTES, Prices
from .program import Program
from .question import Question
from .refit import refit
from .spec import coordinate_of
from .step_graphs import graph_hash, pipelined_graph, step_graph
from .step_memory import memory
from .timings import Timings
from .trace import Traced, request_for
from .trace_cache import traced_once
from .trace_call import describe_call

LossFunction = Callable[..., torch.Tensor]


def describe(model: nn.Module, inputs: Mapping[str, tuple[Dim, ...]]) -> str:
    """A model and its batch for people: ``LlamaForCausalLM, 6.7M parameters, input_ids 8x128``."""
    count = float(sum(p.numel() for p in model.parameters()))
    for unit in ("", "K", "M", "B"):
        if count < 1000 or unit == "B":
            break
        count /= 1000
    shapes = ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in list(inputs.items())[:3])
    return f"{type(model).__name__}, {count:.3g}{unit} parameters, {shapes}"


@dataclass(frozen=True)
class Prepared:
    """A traced and normalised model, with the batch size it was called with."""

    traced: Traced
    graph: Graph
    batch: int

    @property
    def loss(self) -> str | None:
        return self.traced.signature.loss


def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device | str,
    loss_fn: LossFunction | None,
    training: bool | None = None,
    grad: bool = True,
    precision: Precision | None = None,
    timings: Timings | None = None,
    ranks: AxisGroup | None = None,
) -> Prepared:
    """Traces a call under a policy of :mod:`autopar.precision`, once for all ``ranks``, and normalises the graph.
    Raises :class:`OptionsError` if the policy is not for such a model."""
    timings = timings or Timings()
    check_precision(model, precision)
    half = autocast_dtype(precision)
    with timings.phase("trace"):
        request = request_for(
            model, args, kwargs, device=device, loss_fn=loss_fn, training=training, grad=grad, autocast=half
        )
        traced = traced_once(request, ranks)
    with timings.phase("normalise"):
        graph = normalise(traced.graph)
        graph = with_scaled_loss(graph) if scales_loss(precision) else graph
    sizes = dict(graph.symbols)
    return Prepared(traced, graph, next(iter(sizes.values()), batch_size(args, kwargs)))


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The size of dim 0 that most tensor inputs share, as the trace takes it; 1 if there is none."""
    return describe_call(args, dict(kwargs)).batch or 1


def ask(
    model: nn.Module,
    base: Prepared,
    mesh: tuple[int, ...],
    cluster: Cluster,
    options: Options,
    axis_names: tuple[str, ...] = (),
) -> Question:
    """What to plan for a prepared model, described for people."""
    inputs = {node.target: node.type.shape for node in base.graph.at().placeholders("input")}
    return Question(
        graph=base.graph,
        loss=base.loss,
        batch=base.batch,
        mesh=mesh,
        cluster=cluster,
        options=options,
        model=describe(model, inputs),
        axis_names=axis_names,
        notes=base.traced.notes,
    )


@dataclass
class Compiler:
    """Compiles requests for the model on this rank; see the module docstring. ``ranks`` are those of the mesh,
    row-major."""

    model: nn.Module
    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    cluster: Cluster
    options: Options
    device: torch.device
    ranks: AxisGroup
    loss_fn: LossFunction | None = None
    plan: Plan | None = None
    _base: Prepared | None = None
    _annotated: dict[int, Graph] = field(default_factory=dict)
    _source: Compiler | None = None

    def copied_for(self, model: nn.Module) -> Compiler:
        """Compiles for ``model``, a copy of this one, under this one's plan, if there is one when it is first called.
        What is traced of this one says nothing of the copy, whose attributes may change."""
        return replace(self, model=model, _annotated={}, _source=self)

    def __call__(self, request: Request) -> Compiled:
        source = self._source
        if source is not None and self._base is None:
            self.plan, self._base, self.cluster = source.plan, source._base, source.cluster
        if self.plan is None or self._base is None:
            self._plan_for(replace(request, training=True))
        if request.grad and request.training and self._is_as_traced():
            return self._training_program(request)
        return self._other_program(request)

    def _is_as_traced(self) -> bool:
        """Whether the planned trace holds for the model as it is."""
        assert self._base is not None
        if self._source is not None and self._base is self._source._base:
            return False
        return self._wants_same_gradients(self._base) and self._base.traced.reads.changed(self.model) is None

    def _wants_same_gradients(self, base: Prepared | None) -> bool:
        """Whether no parameter was frozen or thawed since the plan was made."""
        assert base is not None
        known = base.traced.parameters
        return all(known.get(name, p.requires_grad) == p.requires_grad for name, p in self.model.named_parameters())

    def _plan_for(self, request: Request) -> None:
        """Plans training on such inputs, whatever the first call is for: parameters must rest somewhere, and training
        needs most. A model that is called, and not stepped, records for ``backward()``, which only plans without stages
        can do: then none is chosen unasked. Prices are rank 0's, or a calibration file that differs between hosts would
        make them take different ways."""
        timings = Timings()
        base = self._prepare(request, grad=True, timings=timings)
        self.cluster = on_first_rank(self.ranks, lambda: self.cluster)
        question = self._question(base)
        if request.grad and request.outputs == "all":
            question = replace(question, options=without_stages(question.options))
        if self.plan is None:
            self.plan = on_first_rank(self.ranks, lambda: answered(question, timings))
        else:
            self.plan.validate()
            _check(self.plan, base, self.mesh)
            if self.plan.pipeline is None:
                check_offered(self.plan, self._annotate(base, self.plan.batch))
        self._base = base

    def _question(self, base: Prepared) -> Question:
        return ask(self.model, base, self.mesh, self.cluster, self.options, self.axis_names)

    def _prepare(self, request: Request, *, grad: bool, timings: Timings | None = None) -> Prepared:
        return prepare(
            self.model,
            request.args,
            request.kwargs,
            device=self.device,
            loss_fn=self.loss_fn,
            training=request.training,
            grad=grad,
            precision=self.options.precision,
            timings=timings,
            ranks=self.ranks,
        )

    def _training_program(self, request: Request) -> Compiled:
        assert self._base is not None and self.plan is not None
        base, batch = self._base, batch_size(request.args, request.kwargs)
        if not _same_but_batch(base, request) or (batch != base.batch and not base.traced.holds_for(batch)):
            base = self._prepare(request, grad=True)
        if self.plan.pipeline is not None:
            return self._staged_training(base, batch)
        known = self._annotate(self._base, self.plan.batch)
        names = {node.target: node.name for node in known.placeholders("param")}
        assignment = self.plan.assignment(names)
        other = known
        if base is not self._base or batch != self.plan.batch:
            other = self._annotated_alike(step_graph(base.graph, base.loss, batch))
            _check_same_model(known, other)
            assignment = refit(assignment, known, other)
            prices = Prices.of(self.cluster, self.plan.mesh, other)
            held = memory(PlacedStep(*recomputed(other, assignment), prices, self.options.optimizer))
            check_memory(self.plan, held.peak, other)
        whole = base.graph if request.outputs == "all" else replace(base.graph, outputs=_loss_outputs(base))
        sizes = {name: batch for name, _ in whole.symbols}
        return self._lowered(InsertRests()(whole.without_dead().at(**sizes)), assignment, other, base)

    def _other_program(self, request: Request) -> Compiled:
        """A program in another mode, without gradients or with others: solved anew with every parameter where it is."""
        assert self.plan is not None
        base = self._prepare(request, grad=request.grad)
        if self.plan.pipeline is not None:
            return self._staged_other(base, None if request.outputs == "all" else base.loss)
        graph = step_graph(base.graph, None if request.outputs == "all" else base.loss, base.batch)
        graph = self._annotated_alike(graph)
        question = replace(self._question(base), mesh=self.plan.mesh)
        places = self.plan.parameters
        assignment = on_first_rank(self.ranks, lambda: fixed_assignment(question, graph, places))
        return self._lowered(graph, assignment, graph, base)

    def _staged_training(self, base: Prepared, batch: int) -> Compiled:
        """The planned step in microbatches, or the same at another batch size."""
        assert self.plan is not None and self._base is not None
        planned = pipelined_graph(self._base.graph, self._base.loss, self.plan.batch)
        if base is self._base and batch == self.plan.batch:
            return self._as_compiled(self._stages().planned(planned, base.graph), planned, base)
        graph = pipelined_graph(base.graph, base.loss, batch)
        _check_same_model(planned, graph)
        return self._as_compiled(self._stages().refitted(graph, planned, base.graph), graph, base)

    def _staged_other(self, base: Prepared, loss: str | None) -> Compiled:
        """Another graph of a model that was planned in stages: evaluation, other gradients."""
        assert self.plan is not None and self._base is not None
        planned = pipelined_graph(self._base.graph, self._base.loss, self.plan.batch)
        graph = pipelined_graph(base.graph, loss, base.batch)
        program = self._stages().other(graph, base.graph, planned, self._base.graph)
        return self._as_compiled(program, graph, base)

    def _stages(self) -> StageCompiler:
        assert self.plan is not None and self._base is not None
        question, places = replace(self._question(self._base), mesh=self.plan.mesh), self.plan.parameters

        def solve(graph: Graph) -> Assignment:
            return on_first_rank(self.ranks, lambda: fixed_assignment(question, graph, places))

        optimizer, index = self.options.optimizer, self.ranks.index
        return StageCompiler(self.plan, self.cluster, optimizer, index, self._annotated_alike, solve)

    def _as_compiled(self, program: PipelineProgram, graph: Graph, base: Prepared) -> Compiled:
        assert self.plan is not None
        text = f"{plan_identity(self.plan)}{graph.to_text()}{program.schedule}{torch.__version__}"
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return Compiled(program, base.traced.signature, self.plan, fingerprint, guards=base.traced.reads)

    def _annotate(self, base: Prepared, batch: int) -> Graph:
        assert self.plan is not None
        if batch not in self._annotated:
            self._annotated[batch] = self._annotated_alike(step_graph(base.graph, base.loss, batch))
        return self._annotated[batch]

    def _annotated_alike(self, graph: Graph) -> Graph:
        """Annotated by what the first rank found out about operations without a rule: what ranks find must not differ,
        and one of them is enough to look."""
        assert self.plan is not None
        mesh = self.plan.mesh

        def find() -> Known:
            annotate(graph, mesh)
            return KNOWN

        if needs_finding(graph):
            KNOWN.adopt(on_first_rank(self.ranks, find))
        return annotate(graph, mesh)

    def _lowered(self, graph: Graph, assignment: Assignment, annotated: Graph, base: Prepared) -> Compiled:
        assert self.plan is not None
        prices = Prices.of(self.cluster, self.plan.mesh, annotated)
        graph, assignment = recomputed(graph, assignment)
        job = Lowering(graph, assignment, coordinate_of(self.ranks.index, self.plan.mesh), prices.path, BUCKET_BYTES)
        program = overlap(lower(job, graph.outputs))
        text = f"{plan_identity(self.plan)}{graph.to_text()}{_messages(program)}{torch.__version__}"
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return Compiled(program, base.traced.signature, self.plan, fingerprint, guards=base.traced.reads)


def _messages(program: Program) -> list[tuple[str, Any]]:
    """The collectives of a program in order: what all ranks must agree on, or they wait for each other for ever."""
    sections = (program.refresh, program.forward, program.backward)
    everything = (instruction for section in sections for instruction in section.instructions)
    return [(i.op, dict(i.kwargs)["axes"]) for i in everything if "axes" in dict(i.kwargs)]


def _loss_outputs(base: Prepared) -> tuple[Any, ...]:
    return tuple(o for o in base.graph.outputs if o.kind != "output" or base.loss is None or o.name == base.loss)


def _same_but_batch(base: Prepared, request: Request) -> bool:
    """Whether the request's inputs have the shapes of the traced ones at another batch size."""
    leaves, spec = pytree.tree_flatten((request.args, dict(request.kwargs)))
    names = base.traced.signature.input_names
    if spec != base.traced.signature.input_spec:
        return False
    batch = batch_size(request.args, request.kwargs)
    graph = base.graph.at(**{name: batch for name, _ in base.graph.symbols})
    types = {node.target: node.type for node in graph.placeholders("input")}
    pairs = [(leaf, types[name]) for leaf, name in zip(leaves, names, strict=True) if name is not None]
    return all(tuple(leaf.shape) == tuple(kind.shape) and leaf.dtype == kind.dtype for leaf, kind in pairs)


def _check_same_model(known: Graph, other: Graph) -> None:
    """Two traces must be the same operations for a plan to carry over."""
    if [node.op for node in known.nodes] != [node.op for node in other.nodes]:
        old = ", ".join(f"{n.target} {n.type}" for n in known.placeholders("input"))
        new = ", ".join(f"{n.target} {n.type}" for n in other.placeholders("input"))
        raise PlanMismatchError(
            f"the model runs other operations on ({new}) than on ({old}), for which the plan was made; make a plan for "
            "each shape (a second autopar.parallelize), or pad the inputs to one shape"
        )


def _check(plan: Plan, base: Prepared, mesh: tuple[int, ...]) -> None:
    """A plan given by the user must be for this model and number of devices."""
    devices, planned = math.prod(mesh), plan.stages * math.prod(plan.mesh)
    if devices != planned:
        stages = f"{plan.stages} stages of " if plan.stages > 1 else ""
        raise PlanMismatchError(
            f"the plan is for {stages}mesh {plan.mesh} of {planned} devices, but the mesh is {mesh} of {devices}"
        )
    found = graph_hash(step_graph(base.graph, base.loss, plan.batch))
    if found != plan.graph_hash:
        raise PlanMismatchError(
            f"the plan was made for {plan.model!r} (graph {plan.graph_hash}); this model, at batch {plan.batch}, "
            f"has graph {found}. Same device type, "
            "configuration, input shapes, mode (train or eval) and torch version give the same graph"
        )
