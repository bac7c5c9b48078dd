"""A round of the search for one pipeline: its placement program is solved within a limit of memory, and the schedules
of the solution are priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.passes.pipeline.cut_candidates import CutCandidate
from autopar.passes.pipeline.microbatch import Microbatched
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.mesh_solution import MeshSolution
from autopar.solver.problem import memory_of

from .fitting_schedules import FittingSchedules, schedules_of
from .pipeline_request import PipelineRequest
from .pipeline_solution import PipelineSolution
from .rehearsed_memory import Overfull, fits
from .stage_meshes import StageLayout

# How often the program is solved: as if stages held the average, then as if all held what the fullest does, then with
# less and less memory. Chosen: each round costs a solve.
ROUNDS = 4
# How many schedules that fit into memory are priced exactly, in the order of their estimates.
# Chosen: an exact price takes longer than an estimate, and the second best estimate may be the better schedule.
PRICED = 2
# How many times as long as the best plan a pipeline takes of which no second schedule is priced: it is only listed. If
# its placements are expected to with what memory costs, none are sought.
# Chosen: exact prices are nearer to estimates than that.
CAN_WIN_WITHIN = 1.15
# As above, of the quickest placements, which do not fit: what does only takes longer.
# Chosen: of Llama 3 8B on 64 devices in two stages, what fits takes 1.003 times the estimate of what does not.
UNLIMITED_CAN_WIN_WITHIN = 1.05
# A schedule that does not fit is worth another solve, with less memory, if it is estimated to take at most this share
# of the seconds of the best that fits. Chosen: GPT-3 in 16 stages fitted under 1F1B alone, and took 0.84 under ZB-V so.
MISSED = 0.9
# How much less than what would just fit is tried next. Chosen: so that few rounds are needed.
LESS = 0.95
# The share of a limit that is tried where no cut has a price. Chosen: nothing tells how far it is too much.
UNCUT = 0.8


@dataclass(frozen=True)
class Program:
    """A program to solve: how often the uncut graph ``repeats``, and its limits, in bytes on all devices together and
    on their hosts. ``aims``: as of the request."""

    repeats: Repeats
    limit: float
    host: float
    aims: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Round:
    """What one ``program`` led to: how it was ``solved``, the schedules that were ``tried`` and ``priced``, and the
    quickest that ``fits``, if any does."""

    program: Program
    solved: tuple[MeshSolution, ...]
    tried: FittingSchedules
    priced: tuple[PipelineSolution, ...]
    fits: PipelineSolution | None

    @property
    def host_bytes(self) -> int:
        return min((solution.breakdown.host_bytes for solution in self.priced), default=0)


@dataclass(frozen=True)
class Sought:
    """What a pipeline is sought for: the ``request``, whose microbatch is ``pieces``, ``saving`` with nodes for saved
    activations, and where it may be cut: ``candidates``, between which ``segment_of`` gives the segment of nodes."""

    request: PipelineRequest
    pieces: Microbatched
    saving: Graph
    candidates: tuple[CutCandidate, ...]
    segment_of: dict[str, int]

    @property
    def first(self) -> Program:
        """The program that counts what stages hold as they may on average."""
        request = self.request
        return Program(self.in_flight(), self.on_all(request.limits), request.host_limit * self.devices)

    @property
    def devices(self) -> int:
        return sum(self.request.layout.sizes)

    def on_all(self, limits: Sequence[float]) -> float:
        """The bytes of all devices together that have ``limits``, by rank."""
        return sum(limit * size for limit, size in zip(limits, self.request.layout.sizes, strict=True))

    def in_flight(self, fullest: bool = False) -> Repeats:
        return inner_repeats(self.request.microbatches, self.request.layout.stages, fullest)

    def as_fullest(self, program: Program) -> Program:
        """The program as if all stages held what the fullest does: the first, which has most in flight."""
        return replace(program, repeats=self.in_flight(fullest=True))

    def with_less_host(self, own: Round) -> Program:
        """The program whose pipelines hold less on their hosts than those of a round, which is too much."""
        return replace(own.program, host=LESS * own.program.host * self.request.host_limit / own.host_bytes)

    def held(self, solved: tuple[MeshSolution, ...]) -> float:
        """The bytes that a solution takes by its program, on all devices together; infinite where stages are
        unequal."""
        if self.request.layout.is_unequal:
            return math.inf
        own = solved[0]
        return memory_of(own.instance.problem, own.solution.choices) * self.request.layout.sizes[0]

    def solve(self, program: Program, slowest: float = math.inf) -> tuple[MeshSolution, ...]:
        return self.request.solve(self.saving, program.repeats, program.limit, program.host, slowest)

    def schedules(self, request: PipelineRequest, solved: tuple[MeshSolution, ...], nearest: bool) -> FittingSchedules:
        return schedules_of(request, self.pieces, self.candidates, self.segment_of, solved, nearest)

    def round(self, program: Program, solved: tuple[MeshSolution, ...], asked: PipelineRequest, nearest: bool) -> Round:
        """Prices schedules of a program as it was ``solved``: of those that may fit as ``asked``, or the ``nearest``
        to it, some that do."""
        request, tried = self.request, self.schedules(asked, solved, nearest)
        priced, fitting = list[PipelineSolution](), list[PipelineSolution]()
        for solution in tried.solutions():
            priced.append(solution)
            fitting += [solution] if fits(solution, request.limits, request.host_limit) else []
            if len(fitting) == PRICED or (fitting and fitting[0].seconds > CAN_WIN_WITHIN * request.best):
                break
        return Round(program, solved, tried, tuple(priced), quickest_of(*fitting))


def quickest_of(*solutions: PipelineSolution | None) -> PipelineSolution | None:
    return min(filter(None, solutions), key=lambda solution: solution.seconds, default=None)


def slowest_of_use(sought: Sought, quickest: tuple[MeshSolution, ...]) -> float:
    """Seconds of a program within the limits with which a pipeline would not win: it is expected to take longer than
    that of the ``quickest`` placements, which do not fit, as its program does. Raises :class:`TooSlowError` if not even
    that would win."""
    request, free = sought.request, without_limits(sought.request)

    def make() -> float:
        return sought.schedules(free, quickest, nearest=False).least_seconds

    of = sought.pieces, request.cluster, *(own.instance.choices for own in quickest)
    chosen = tuple(own.solution.choices.tobytes() for own in quickest)
    settings = request.layout, request.schedule, request.chunks, tuple(request.pins.items()), chosen
    seconds = request.shared.once("quickest pipeline", of, *settings, make=make)
    if seconds > UNLIMITED_CAN_WIN_WITHIN * request.best:
        raise TooSlowError(where(request.layout), seconds, is_proven=False, is_least=True)
    return CAN_WIN_WITHIN * request.best / seconds * max(own.solution.objective for own in quickest)


def without_limits(request: PipelineRequest) -> PipelineRequest:
    return replace(request, limits=(math.inf,) * request.layout.stages, host_limit=math.inf)


def inner_repeats(microbatches: int, stages: int, fullest: bool = False) -> Repeats:
    """How often the placement program assumes the uncut graph to run, and with how many microbatches in flight: half as
    many as there are stages, the average of 1F1B, or as many as its ``fullest`` stage, the first, has."""
    in_flight = min(microbatches, stages if fullest else math.ceil((stages + 1) / 2))
    return Repeats(microbatches, in_flight, accumulates=True, stages=stages)


def too_full(request: PipelineRequest, worst: Overfull) -> InfeasibleError:
    """That nothing fits; ``worst`` is nearest to it."""
    known, alike = math.isfinite(worst.share), len(set(request.limits)) == 1
    within = "" if alike or not known else f", where it may hold {worst.limit:.0f}"
    fullest = f"; the fullest stage of the best cut needs {worst.bytes}{within}" if known else ""
    limits = f"{request.limits[0]:.0f}" if alike else ", ".join(f"{limit:.0f}" for limit in request.limits)
    return InfeasibleError(
        f"{where(request.layout)} with {request.microbatches} microbatches do "
        f"not fit into {limits} bytes per device{fullest}. More stages or microbatches hold less each"
    ).needing(worst.bytes if known and alike else None)


def where(layout: StageLayout) -> str:
    return layout.described if layout.counts else f"{layout.stages} stages on meshes {layout.mesh}"
