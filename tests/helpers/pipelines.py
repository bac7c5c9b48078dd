"""Pipelines that no planner would make: cut anywhere, any strategy for every node, any schedule."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from autopar.arguments import split_batch
from autopar.cluster.description import Cluster
from autopar.compiler.pipeline import pipeline_program
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.signature import Signature
from autopar.ir.stage_meshes import StageMeshes
from autopar.ir.staged_graph import Staged
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.lower_chunk import Wires
from autopar.passes.normalise.standard import normalise
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.cut_candidates import cut_candidates, cuts_for_owners
from autopar.passes.pipeline.microbatch import Microbatched, microbatch
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.prices import Prices
from autopar.planner.step_graphs import step_graph
from autopar.runtime import Compiled, Request
from autopar.schedule.messages import forward_only
from autopar.schedule.named import SCHEDULES
from autopar.schedule.schedule import Schedule
from autopar.search.fitting_schedules import scheduled
from autopar.search.schedules.chunks import Chunk, WirePrice, place_chunks
from autopar.trace.tracer import Traced, trace
from tests.helpers.lowering import plain
from tests.zoo.check import prices_for, random_assignment

SCHEDULE_NAMES = tuple(SCHEDULES)


@dataclass(frozen=True)
class Wanted:
    """``mesh``: stages, then the mesh inside one. ``schedule``: name and chunks per rank. ``anywhere``: cut at random
    places rather than good ones. ``unequal``: the mesh inside each stage, where these differ from the one in ``mesh``,
    with as many axes."""

    mesh: tuple[int, ...]
    schedule: str
    microbatches: int
    chunks: int | None = None
    seed: int = 0
    anywhere: bool = False
    unequal: tuple[tuple[int, ...], ...] = ()

    @property
    def meshes(self) -> StageMeshes:
        return StageMeshes(self.unequal) if self.unequal else StageMeshes.equal(self.mesh[0], self.mesh[1:])

    @property
    def count(self) -> int:
        """The number of chunks."""
        return self.mesh[0] * (self.chunks or SCHEDULES[self.schedule].least)


@dataclass(frozen=True)
class Made:
    """All that the ranks' programs are made of."""

    pieces: Microbatched
    staged: Staged
    chunks: tuple[Chunk, ...]
    wires: Wires
    schedule: Schedule
    prices: tuple[Prices, ...]

    @property
    def meshes(self) -> StageMeshes:
        return StageMeshes(tuple(own.mesh for own in self.prices))

    @property
    def cluster(self) -> Cluster:
        return self.prices[0].cluster

    def program(self, device: int) -> PipelineProgram:
        paths, messages = [own.path for own in self.prices], self.prices[0].messages
        parts = self.pieces, self.staged, self.chunks, self.wires, self.schedule
        return pipeline_program(*parts, device, paths, 256, messages)

    def programs(self) -> list[PipelineProgram]:
        """Of all ranks, in their order."""
        return [self.program(device) for device in range(self.meshes.devices)]


def cuts_of(graph: Graph, wanted: Wanted) -> tuple[str, ...]:
    """Names of the nodes that begin chunks: every so many good places, or random ones."""
    if wanted.anywhere:
        forward = [node.name for node in graph if node.phase == "forward" and not node.is_placeholder][1:]
        chosen = sorted(random.Random(wanted.seed).sample(range(len(forward)), wanted.count - 1))
        return tuple(forward[index] for index in chosen)
    places = [candidate.name for candidate in cut_candidates(graph, wanted.count - 1)]
    return tuple(places[len(places) * index // wanted.count] for index in range(1, wanted.count))


def make_pipeline(graph: Graph, wanted: Wanted, *, like: Made | None = None) -> Made:
    """``graph``: a concrete step graph without saved activations; one that only goes forward gets a forward schedule.
    ``like``: parameters lie where that one has them."""
    pieces = microbatch(graph, wanted.microbatches)
    cuts = (
        cuts_of(pieces.graph, wanted)
        if like is None
        else cuts_for_owners(pieces.graph, like.staged.owners, wanted.count)
    )
    staged = cut(pieces, cuts)
    schedule = scheduled((wanted.schedule, wanted.count // wanted.mesh[0]), wanted.mesh[0], pieces.count, staged)
    if not graph.placeholders("tangent"):
        schedule = forward_only(schedule)
    saving = SaveActivations()(pieces.graph)
    placed = {mesh: _placed(saving, mesh, wanted, like) for mesh in dict.fromkeys(wanted.meshes.meshes)}
    on_ranks = [placed[mesh] for mesh in wanted.meshes.meshes]
    of_chunks = [on_ranks[rank] for rank in schedule.placement]
    links = {(edge.source, edge.target): WirePrice(1e-5, 1e10) for edge in staged.edges}
    chunks, wires = place_chunks(staged, [own for own, _ in of_chunks], [own for _, own in of_chunks], links)
    return Made(pieces, staged, chunks, wires, schedule, tuple(own for _, own in on_ranks))


def _placed(graph: Graph, mesh: tuple[int, ...], wanted: Wanted, like: Made | None) -> tuple[Assignment, Prices]:
    """Any placement of the graph on one mesh, and prices there."""
    whole = annotate(graph, mesh)
    assignment = random_assignment(whole, mesh, wanted.seed)
    if like is not None:
        parameters = assignment.parameters | _parameters_of(like, whole, mesh)
        assignment = replace(assignment, parameters=parameters)
    return assignment, prices_for(whole, mesh)


def _parameters_of(like: Made, graph: Graph, mesh: tuple[int, ...]) -> dict[str, ParameterPlacement]:
    """Where ``like`` has the parameters on ``mesh``, by their names in another trace."""
    places = {
        node.target: chunk.assignment.parameters[node.name]
        for chunk in like.chunks
        if chunk.assignment.mesh == mesh
        for node in chunk.graph.placeholders("param")
    }
    return {node.name: places[node.target] for node in graph.placeholders("param") if node.target in places}


@dataclass(frozen=True)
class Stepped:
    """What a request becomes on all ranks alike, before each is given its part."""

    signature: Signature
    made: Made
    fingerprint: str


def traced_for(model: nn.Module, request: Request) -> Traced:
    return trace(model, request.args, request.kwargs, device="cpu", training=request.training, grad=request.grad)


def cut_for_all(traced: Traced, wanted: Wanted, request: Request, *, like: Made | None = None) -> Stepped:
    """The pipeline of a traced request; ``like`` as for :func:`make_pipeline`."""
    sizes = dict(traced.graph.symbols)
    loss = None if request.outputs == "all" else traced.signature.loss
    graph = step_graph(normalise(traced.graph), loss, next(iter(sizes.values()), 1))
    made = make_pipeline(plain(graph), wanted, like=like)
    fingerprint = hashlib.sha256(f"{graph.to_text()}{made.schedule}{wanted}".encode()).hexdigest()
    return Stepped(traced.signature, made, fingerprint)


def training_step(batch: Any) -> Request:
    return Request(*split_batch(batch), training=True, grad=True, outputs="loss")


@dataclass(frozen=True)
class Ready:
    """A request that was compiled before the processes were forked, so that each need not do it again."""

    request: Request
    stepped: Stepped

    def answers(self, request: Request) -> bool:
        return _kind(request) == _kind(self.request)


def _kind(request: Request) -> object:
    leaves, spec = tree_flatten((request.args, request.kwargs))
    sizes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return request.training, request.grad, request.outputs, spec, sizes


@dataclass
class PipelineCompiler:
    """Compiles requests for one rank of ``wanted``, by hand; the first must be for training."""

    model: nn.Module
    wanted: Wanted
    device: int
    ready: Ready | None = None
    first: Made | None = None

    def __call__(self, request: Request) -> Compiled:
        if self.ready is not None and self.ready.answers(request):
            found = self.ready.stepped
        else:
            found = cut_for_all(traced_for(self.model, request), self.wanted, request, like=self.first)
        self.first = self.first or found.made
        return Compiled(found.made.program(self.device), found.signature, self.wanted, found.fingerprint)
