"""Pipelines that no planner would make: cut anywhere, any strategy for every node, any schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from autopar.assignment import Assignment
from autopar.compile_pipeline import PlacedChunk, pipeline_program
from autopar.graph import Graph
from autopar.passes.annotate import annotate
from autopar.passes.cut_candidates import cut_candidates
from autopar.passes.lower_chunk import Wires
from autopar.passes.microbatch import Microbatched, microbatch
from autopar.passes.rest import InsertRests
from autopar.passes.stages import cut
from autopar.pipeline import PipelineProgram
from autopar.prices import Prices
from autopar.schedule import Schedule
from autopar.schedule_messages import forward_only
from autopar.schedules import SCHEDULES
from autopar.stage_chunks import WirePrice, place_chunks
from autopar.stage_search import scheduled
from autopar.stages import Staged
from tests.zoo.check import prices_for, random_assignment

SCHEDULE_NAMES = tuple(SCHEDULES)


@dataclass(frozen=True)
class Wanted:
    """``mesh``: stages, then the mesh inside one. ``schedule``: name and chunks per rank. ``anywhere``: cut at random
    places rather than good ones."""

    mesh: tuple[int, ...]
    schedule: str
    microbatches: int
    chunks: int | None = None
    seed: int = 0
    anywhere: bool = False

    @property
    def count(self) -> int:
        """The number of chunks."""
        return self.mesh[0] * (self.chunks or SCHEDULES[self.schedule].least)


@dataclass(frozen=True)
class Made:
    """All that the ranks' programs are made of."""

    pieces: Microbatched
    staged: Staged
    chunks: tuple[PlacedChunk, ...]
    wires: Wires
    schedule: Schedule
    prices: Prices

    def program(self, coordinate: tuple[int, ...]) -> PipelineProgram:
        return pipeline_program(
            self.pieces, self.staged, self.chunks, self.wires, self.schedule, coordinate, self.prices.path, 256
        )

    def programs(self) -> list[PipelineProgram]:
        """Of all ranks, row-major."""
        mesh = (self.schedule.stages, *self.prices.mesh)
        return [self.program(coordinate) for coordinate in product(*map(range, mesh))]


def cuts_of(graph: Graph, wanted: Wanted) -> tuple[str, ...]:
    """Names of the nodes that begin chunks: every so many good places, or random ones."""
    draw = random.Random(wanted.seed)
    if wanted.anywhere:
        places = [node.name for node in graph if node.phase == "forward" and not node.is_placeholder][1:]
    else:
        places = [candidate.name for candidate in cut_candidates(graph)]
    chosen = sorted(draw.sample(range(len(places)), wanted.count - 1))
    return tuple(places[index] for index in chosen)


def replicated_assignment(graph: Graph, assignment: Assignment, share: float, seed: int) -> Assignment:
    """Some of the random choices undone, or everything would be resharded everywhere."""
    draw = random.Random(seed)
    strategies = {
        name: graph.strategies[name][0] if draw.random() < share else strategy
        for name, strategy in assignment.strategies.items()
    }
    return Assignment(assignment.mesh, strategies, assignment.parameters)


def make_pipeline(graph: Graph, wanted: Wanted, *, training: bool = True) -> Made:
    """``graph``: a concrete step graph without rests."""
    inside = wanted.mesh[1:] or (1,)
    pieces = microbatch(graph, wanted.microbatches)
    staged = cut(pieces, cuts_of(pieces.graph, wanted))
    schedule = scheduled((wanted.schedule, wanted.count // wanted.mesh[0]), wanted.mesh[0], pieces.count, staged)
    whole = annotate(InsertRests()(pieces.graph), inside)
    prices = prices_for(whole, inside)
    assignment = random_assignment(whole, inside, wanted.seed)
    links = {(edge.source, edge.target): WirePrice(1e-5, 1e10) for edge in staged.edges}
    chunks, wires = place_chunks(staged, assignment, prices, links)
    return Made(pieces, staged, chunks, wires, schedule if training else forward_only(schedule), prices)
