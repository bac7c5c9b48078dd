"""The quickest pipeline for one division of the devices into stages and of the batch into microbatches.

The placement program is solved once, for the graph of one microbatch on the mesh inside a stage, or once for each kind
of stage where they have unequal meshes. Its solution prices every node. From these prices come the cuts (:mod:`.cuts`)
and, for each schedule, the simulated step (:mod:`.pipeline_breakdown`). The quickest step wins.

The memory of the uncut graph is taken as that of all stages together. If a stage turns out too full, the program is
solved again with less memory, a few times.

Where devices are of several kinds (:mod:`.stage_devices`), each stage is priced and limited by its own, and the order
in which stages lie on them is tried like a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.passes.pipeline.cut_candidates import CutCandidate, cut_candidates
from autopar.passes.pipeline.microbatch import Microbatched, microbatch
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.planner.infeasible import check_host
from autopar.planner.memory_limit import MORE_ROUNDS, SPARE, Needed, ShortOfMemoryError, TooSlowError, next_limit
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.steps.exact_memory import is_rehearsed
from autopar.solver.problem import memory_of

from .fitting_schedules import FittingSchedules, kinds_within, schedules_of
from .pipeline_request import PipelineRequest
from .pipeline_solution import PipelineSolution
from .rehearsed_memory import Overfull, counted_beyond, fits, is_soon_rehearsed, peaks_of
from .segments import PinnedTogetherError, pinned_ranks, segment_of_nodes
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
# The share of its seconds that a limit may cost a pipeline without being worth another solve. Chosen: as Options.gap.
COSTS_LITTLE = 0.01


def search(request: PipelineRequest) -> PipelineSolution:
    """The quickest pipeline for one layout and number of microbatches.

    Raises:
        InfeasibleError: no division into stages fits into the memory of the devices or of their hosts.
            :class:`TooSlowError`: such a pipeline is expected to take longer than the best plan.
        OptionsError: the batch does not divide, the model has too few places to cut, or a pin cannot be met.
    """
    pieces = _pieces(request)
    saving = request.shared.once("saving", (pieces,), make=lambda: SaveActivations()(pieces.graph))
    candidates, segment_of = _candidates(request, pieces.graph)
    kinds_within(request, len(candidates) + 1)
    return _Search(request, pieces, saving, candidates, segment_of).best()


@dataclass(frozen=True)
class _Program:
    """A program to solve: how often the uncut graph ``repeats``, and its limits, in bytes on all devices together and
    on their hosts. ``aims``: as of the request."""

    repeats: Repeats
    limit: float
    host: float
    aims: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _Round:
    """What one ``program`` led to: how it was ``solved``, the schedules that were ``tried`` and ``priced``, and the
    quickest that ``fits``, if any does."""

    program: _Program
    solved: tuple[MeshSolution, ...]
    tried: FittingSchedules
    priced: tuple[PipelineSolution, ...]
    fits: PipelineSolution | None

    @property
    def host_bytes(self) -> int:
        return min((solution.breakdown.host_bytes for solution in self.priced), default=0)


@dataclass
class _Search:
    """The search for a ``request``, whose microbatch is ``pieces``, ``saving`` with nodes for saved activations.

    Where pipelines are soon rehearsed, what they hold is compared with the limits, and what programs and cuts count may
    exceed these by as much as it did in the round before. ``found``: the best so far; ``free``: seconds of the quickest
    whether it fits or not; ``beyond`` and ``within``: what programs count, and pipelines hold on the fullest rank, that
    do not fit and that do, by device; ``worst``: how far what does not fit is from it."""

    request: PipelineRequest
    pieces: Microbatched
    saving: Graph
    candidates: tuple[CutCandidate, ...]
    segment_of: dict[str, int]
    found: PipelineSolution | None = None
    free: float = math.inf
    beyond: Needed | None = None
    within: Needed | None = None
    worst: Overfull = field(default_factory=Overfull)
    is_last: bool = False
    turns: int = MORE_ROUNDS
    failed: int = 0
    chosen: tuple[bytes, ...] = ()
    has_retried: bool = False

    def best(self) -> PipelineSolution:
        request = self.request
        program: _Program | None = self._first
        quickest = self._too_large(self._first)
        slowest = math.inf if quickest is None else self._slowest(quickest)
        if self.is_rehearsed:
            program = self._after_free(self._unlimited(quickest))
        rounds, last = ROUNDS + (MORE_ROUNDS if self.is_rehearsed else 0), None
        while program is not None and rounds > 0:
            rounds -= 1
            try:
                last = self._round(
                    program, request.solve(self.saving, program.repeats, program.limit, program.host, slowest)
                )
            except ShortOfMemoryError:
                program = replace(program, repeats=self._in_flight(fullest=True))
            except InfeasibleError as error:
                program = self._after_infeasible(program, error)
            else:
                program = self._after(last)
        if self.found is not None:
            return self.found
        if last is not None:
            check_host(last.solved[0].prices.cluster, last.host_bytes, request.host_limit)
        raise _too_full(request, self.worst)

    @property
    def is_rehearsed(self) -> bool:
        return self.request.layout.stages > 1 and is_soon_rehearsed(self.saving, self.request.microbatches)

    @property
    def _first(self) -> _Program:
        sizes = self.request.layout.sizes
        return _Program(self._in_flight(), self._on_all(self.request.limits), self.request.host_limit * sum(sizes))

    def _in_flight(self, fullest: bool = False) -> Repeats:
        return inner_repeats(self.request.microbatches, self.request.layout.stages, fullest)

    def _on_all(self, limits: Sequence[float]) -> float:
        """The bytes of all devices together that have ``limits``, by rank."""
        return sum(limit * size for limit, size in zip(limits, self.request.layout.sizes, strict=True))

    def _too_large(self, program: _Program) -> tuple[MeshSolution, ...] | None:
        if self.request.layout.stages == 1 or math.isinf(self.request.best):
            return None
        return self.request.too_large(self.saving, program.repeats, program.limit, program.host)

    def _slowest(self, quickest: tuple[MeshSolution, ...]) -> float:
        """Seconds of a program within the limits with which a pipeline would not win: it is expected to take longer
        than that of the ``quickest`` placements, which do not fit, as its program does. Raises :class:`TooSlowError` if
        not even that would win."""
        request, free = self.request, _without_limits(self.request)

        def make() -> float:
            return self._schedules(free, quickest, nearest=False).least_seconds

        of = self.pieces, request.cluster, *(own.instance.choices for own in quickest)
        chosen = tuple(own.solution.choices.tobytes() for own in quickest)
        settings = request.layout, request.schedule, request.chunks, tuple(request.pins.items()), chosen
        seconds = request.shared.once("quickest pipeline", of, *settings, make=make)
        if seconds > UNLIMITED_CAN_WIN_WITHIN * request.best:
            raise TooSlowError(_where(request.layout), seconds, is_proven=False, is_least=True)
        return CAN_WIN_WITHIN * request.best / seconds * max(own.solution.objective for own in quickest)

    def _schedules(self, request: PipelineRequest, solved: tuple[MeshSolution, ...], nearest: bool) -> FittingSchedules:
        return schedules_of(request, self.pieces, self.candidates, self.segment_of, solved, nearest)

    def _round(self, program: _Program, solved: tuple[MeshSolution, ...]) -> _Round:
        """Prices the schedules of a program as it was ``solved``, and keeps the quickest that fits."""
        # What a whole step holds is measured: what is counted rules out nothing.
        is_whole = self.request.layout.stages == 1 and is_rehearsed(solved[0].instance)
        request = _without_limits(self.request) if is_whole else replace(self.request, aims=program.aims)
        # How much is too much matters in the last rounds alone.
        nearest = self.is_rehearsed or program.repeats == self._in_flight(fullest=True)
        tried = self._schedules(request, solved, nearest)
        priced, fitting = list[PipelineSolution](), list[PipelineSolution]()
        for solution in tried.solutions():
            priced.append(solution)
            fitting += [solution] if fits(solution, self.request.limits, self.request.host_limit) else []
            if len(fitting) == PRICED or (fitting and fitting[0].seconds > CAN_WIN_WITHIN * self.request.best):
                break
        quickest = min(fitting, key=lambda solution: solution.seconds, default=None)
        self.found = min(filter(None, [self.found, quickest]), key=lambda solution: solution.seconds, default=None)
        return _Round(program, solved, tried, tuple(priced), quickest)

    def _unlimited(self, quickest: tuple[MeshSolution, ...] | None) -> _Round:
        """The round without limits of memory. ``quickest``: the solutions of its program, if they are known."""
        program = replace(self._first, limit=math.inf, aims=(math.inf,) * self.request.layout.stages)
        solve = self.request.solve
        return self._round(program, quickest or solve(self.saving, program.repeats, math.inf, program.host, math.inf))

    def _after_free(self, own: _Round) -> _Program | None:
        """The program after that without limits, whose solution costs nothing but time; None if what was found is
        about as quick as can be."""
        self.free = min((solution.seconds for solution in own.priced), default=math.inf)
        if self.found is not None and self.free >= MISSED * self.found.seconds:
            return None
        if not own.priced:
            return self._first
        self.beyond = self._needed(own)
        return self._aimed(own)

    def _after(self, own: _Round) -> _Program | None:
        """The program to solve after a round; None if there is none that promises more."""
        if self.is_rehearsed:
            return self._after_rehearsed(own)
        program = replace(own.program, repeats=self._in_flight(fullest=True))
        if self.found is not None:
            return self._quicker(own, program)
        if own.host_bytes > self.request.host_limit:
            # 5% less than what would just fit: chosen, so that few rounds are needed.
            return replace(program, host=0.95 * program.host * self.request.host_limit / own.host_bytes)
        self.worst = min([self.worst, *(Overfull.of(solution, self.request.limits) for solution in own.priced)])
        if own.program.repeats != program.repeats:
            return program  # Memory binds: the first stage, which has most in flight, decides.
        # As above, and less than this solution has, lest it be found again; a fifth less where nothing could be cut.
        limit = min(program.limit, _held(self.request, own.solved))
        return replace(
            program, limit=limit * (0.95 * min(1.0, 1.0 / self.worst.share) if math.isfinite(self.worst.share) else 0.8)
        )

    def _quicker(self, own: _Round, program: _Program) -> _Program | None:
        """The program that may let schedules fit which would be quicker than what was found; ``program``: with more in
        flight, as these may have."""
        assert self.found is not None
        seconds = MISSED * self.found.seconds
        share = None if self.is_last else own.tried.fullness_of_quicker(seconds)
        if share is not None:
            self.is_last = True
            return replace(program, limit=0.95 * min(own.program.limit, _held(self.request, own.solved)) / share)
        has_more = own.program.repeats == self._in_flight() != program.repeats
        return program if has_more and own.tried.is_any_quicker(seconds) else None

    def _after_rehearsed(self, own: _Round) -> _Program | None:
        request = self.request
        if own.fits is None and own.host_bytes > request.host_limit:
            return replace(own.program, host=0.95 * own.program.host * request.host_limit / own.host_bytes)
        if not own.priced:
            return replace(own.program, limit=0.8 * min(own.program.limit, _held(request, own.solved)))
        needed = self._needed(own)
        if own.fits is None:
            self.beyond = needed
        else:
            again, self.chosen = self.chosen, tuple(each.solution.choices.tobytes() for each in own.solved)
            if again == self.chosen:
                return None  # A still higher limit mostly has the same solution.
            self.within, self.turns = needed, self.turns - 1
            may_be_quicker = self.found is not None and self.free < MISSED * self.found.seconds
            quicker = self._quicker(own, own.program) if may_be_quicker else None
            if quicker is not None:
                return quicker
        return self._aimed(own)

    def _aimed(self, own: _Round) -> _Program | None:
        """The program whose pipelines hold about as much as they may, as ``own`` shows; None if nothing is left that
        would make them quicker."""
        request, allowed, devices = self.request, min(self.request.limits), sum(self.request.layout.sizes)
        limit = next_limit(allowed, self.beyond, self.within)
        if self.within is None and self.beyond is not None:
            # What is saved may be saved by other ranks than the fullest: then more and more is.
            less = self.beyond.counted - 2**self.failed * (self.beyond.counted - limit)
            limit = min(limit, max(less, 0.95 * self.beyond.counted * allowed / self.beyond.peak))
            self.failed += 1
        if self.within is not None:
            costs = self.found is not None and self.found.seconds > (1.0 + COSTS_LITTLE) * self.free
            if not costs or self.turns < 0 or limit - self.within.counted < SPARE * allowed:
                return None
        more = counted_beyond(self._nearest(own))
        aims = tuple(limit + own for limit, own in zip(request.limits, more, strict=True))
        return replace(own.program, limit=limit * devices, aims=aims)

    def _nearest(self, own: _Round) -> PipelineSolution:
        """The quickest pipeline of a round that fits or, if none does, that which is nearest to it."""
        return own.fits or min(own.priced, key=lambda solution: Overfull.of(solution, self.request.limits))

    def _needed(self, own: _Round) -> Needed:
        """What the program of a round counts, and how much the fullest rank of its pipeline holds."""
        request, devices = self.request, sum(self.request.layout.sizes)
        limits, counted = request.limits, _held(request, own.solved)
        if own.fits is not None and math.isfinite(own.program.limit):
            counted = own.program.limit  # Nothing that the program counts within that is quicker.
        nearest = self._nearest(own)
        over = max(held - limit for held, limit in zip(peaks_of(nearest), limits, strict=True))
        if own.fits is None:
            self.worst = min(self.worst, Overfull.of(nearest, request.limits))
        return Needed(min(counted, own.program.limit) / devices, min(limits) + over)

    def _after_infeasible(self, program: _Program, error: InfeasibleError) -> _Program | None:
        """The program after one that has no solution: where less cannot be counted, as much may still be held."""
        if self.found is not None:
            return None
        if self.beyond is None or self.has_retried or isinstance(error, TooSlowError):
            raise error
        self.has_retried = True
        return replace(program, limit=(program.limit + self.beyond.counted * sum(self.request.layout.sizes)) / 2)


def _without_limits(request: PipelineRequest) -> PipelineRequest:
    return replace(request, limits=(math.inf,) * request.layout.stages, host_limit=math.inf)


def _held(request: PipelineRequest, solved: tuple[MeshSolution, ...]) -> float:
    """The bytes that a solution takes by its program, on all devices together; infinite where stages are unequal."""
    if request.layout.is_unequal:
        return math.inf
    own = solved[0]
    return memory_of(own.instance.problem, own.solution.choices) * request.layout.sizes[0]


def _pieces(request: PipelineRequest) -> Microbatched:
    """The graph of a microbatch. Raises :class:`OptionsError` if the batch does not divide."""
    graph, count, inputs = request.graph, request.microbatches, request.inputs
    settings = count, tuple(inputs.items()), request.alone is None
    return request.shared.once(
        "microbatch", (graph,), *settings, make=lambda: microbatch(graph, count, inputs, request.alone)
    )


def _candidates(request: PipelineRequest, graph: Graph) -> tuple[tuple[CutCandidate, ...], dict[str, int]]:
    """Where the graph may be cut, and the segment of each node. Takes the best places, and as many more as are needed
    to separate modules that pins put on different stages. Raises :class:`OptionsError` if none separate them."""
    least = _least_cuts(request)
    while True:
        cuts = cut_candidates if request.layout.stages > 1 else _no_cuts
        candidates, segment_of = request.shared.once(
            "segments", (graph,), cuts, least, make=partial(_segments, graph, cuts, least)
        )
        try:
            pinned_ranks(graph, segment_of, len(candidates) + 1, request.pins, request.layout.stages)
        except PinnedTogetherError:
            if len(candidates) < least:
                raise
            least = len(candidates) + 1
        else:
            return candidates, segment_of


def _no_cuts(graph: Graph, least: int) -> tuple[CutCandidate, ...]:
    return ()


def _segments(
    graph: Graph, cuts: Callable[[Graph, int], tuple[CutCandidate, ...]], least: int
) -> tuple[tuple[CutCandidate, ...], dict[str, int]]:
    candidates = cuts(graph, least)
    return candidates, segment_of_nodes(graph, candidates)


def _least_cuts(request: PipelineRequest) -> int:
    """How many cuts are needed at least: those of the requested schedule, or of one with a chunk per stage."""
    return min(request.layout.stages * chunks for _, chunks in request.kinds) - 1


def inner_repeats(microbatches: int, stages: int, fullest: bool = False) -> Repeats:
    """How often the placement program assumes the uncut graph to run, and with how many microbatches in flight: half as
    many as there are stages, the average of 1F1B, or as many as its ``fullest`` stage, the first, has."""
    in_flight = min(microbatches, stages if fullest else math.ceil((stages + 1) / 2))
    return Repeats(microbatches, in_flight, accumulates=True, stages=stages)


def _too_full(request: PipelineRequest, worst: Overfull) -> InfeasibleError:
    known, alike = math.isfinite(worst.share), len(set(request.limits)) == 1
    within = "" if alike or not known else f", where it may hold {worst.limit:.0f}"
    fullest = f"; the fullest stage of the best cut needs {worst.bytes}{within}" if known else ""
    limits = f"{request.limits[0]:.0f}" if alike else ", ".join(f"{limit:.0f}" for limit in request.limits)
    return InfeasibleError(
        f"{_where(request.layout)} with {request.microbatches} microbatches do "
        f"not fit into {limits} bytes per device{fullest}. More stages or microbatches hold less each"
    ).needing(worst.bytes if known and alike else None)


def _where(layout: StageLayout) -> str:
    return layout.described if layout.counts else f"{layout.stages} stages on meshes {layout.mesh}"
