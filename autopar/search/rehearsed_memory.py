"""Measures the memory of every stage of a planned pipeline, by rehearsing the programs of its ranks; see
:mod:`autopar.planner.steps.exact_memory`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram, StagedParameter
from autopar.ir.plan_record import Predicted
from autopar.ir.stage_meshes import StageMeshes
from autopar.passes.lower.lower import Lowering
from autopar.passes.lower.lower_chunk import ChunkLowering, lower_chunk
from autopar.placement.memory_bound import HostMemory, Memory, host_memory, memory
from autopar.placement.placed_step import PlacedStep
from autopar.placement.predicted import memory_figures
from autopar.placement.prices import BUCKET_BYTES, Prices
from autopar.placement.rooms import Room
from autopar.planner.memory_limit import MORE_ROUNDS, SPARE, Needed, TooSlowError, next_limit
from autopar.planner.mesh_solution import InRoom, counted_peak
from autopar.planner.peaks import NEAR
from autopar.planner.steps.exact_memory import ExactMemory, of_step, reason_of
from autopar.planner.within_memory import BUYS_LITTLE
from autopar.runtime.rehearse.rehearsal import rehearse

from .fitting_schedules import PipelineSolution
from .infeasible import FULLER
from .pipeline import search
from .pipeline_predicted import rank_holdings, rank_steps
from .pipeline_request import PipelineRequest
from .shared_parameters import shared_parameters

# The most operations that a rehearsal may run in all. Larger pipelines keep the estimate of their cost breakdown.
# Chosen: what a search may wait for; not measured.
EFFORT = 40_000
# How often a pipeline is searched again with less memory. Chosen: each round costs a solve.
ROUNDS = 4
# How many times the limits a pipeline may count that is tried though nothing that counts less fits.
# Chosen: of small transformers in microbatches, what just fits counts 1.2 times the limit.
PLAUSIBLE = 1.5


@dataclass(frozen=True)
class ExactStages:
    """For each pipeline rank, the memory of its devices at their peak, of several rooms that of the tightest. ``ranks``
    is None if a rehearsal would take too long or failed; ``warnings`` say why it failed. ``rooms``: by rank, what the
    devices in each room hold, bounds if it was not rehearsed."""

    ranks: tuple[ExactMemory, ...] | None
    rooms: tuple[tuple[InRoom, ...], ...]
    warnings: tuple[str, ...] = ()

    @property
    def has_rooms(self) -> bool:
        return any(self.rooms)

    def tightest(self, rank: int) -> InRoom | None:
        """The room of a rank that is fullest for its limit, where it has several."""
        return max(self.rooms[rank], key=lambda held: held.peak / held.room.limit, default=None)


def exact_stages(solution: PipelineSolution) -> ExactStages:
    """Measures the memory of the stages of ``solution``, once, by rehearsing the program of the fullest device of
    each."""
    if "stages" not in solution.measured:
        solution.measured["stages"] = _rehearsed(solution)
    found: ExactStages = solution.measured["stages"]
    return found


def _rehearsed(solution: PipelineSolution) -> ExactStages:
    schedule, step = solution.breakdown.schedule, solution.uncut.step
    if solution.is_one_step:  # Of which the plan without stages says why it could not be rehearsed.
        return ExactStages(None if step.memory.memory is None else (step.memory,), (step.rooms,))
    if sum(len(chunk.graph) for chunk in solution.breakdown.chunks) * schedule.microbatches > EFFORT:
        return ExactStages(None, _in_rooms(solution, rehearses=False))
    try:
        found = ExactStages(None, _in_rooms(solution, rehearses=True))
        tightest = map(found.tightest, range(schedule.stages))
        ranks = (_of_rank(solution, rank) if held is None else held.exact for rank, held in enumerate(tightest))
        return replace(found, ranks=tuple(ranks))
    except Exception as error:  # Any operation may lack an implementation for tensors without data.
        warning = f"memory of stages is an estimate: their steps could not be rehearsed ({reason_of(error)})"
        return ExactStages(None, _in_rooms(solution, rehearses=False), (warning,))


def _in_rooms(solution: PipelineSolution, rehearses: bool) -> tuple[tuple[InRoom, ...], ...]:
    """By rank, what the devices in each room hold, where these differ."""
    return tuple(
        tuple(_in_room(solution, rank, prices.in_room(room), room, rehearses) for room in prices.rooms)
        for rank, prices in enumerate(solution.prices)
    )


def _in_room(solution: PipelineSolution, rank: int, prices: Prices, room: Room, rehearses: bool) -> InRoom:
    if rehearses:
        exact = _of_rank(solution, rank, prices)
        assert exact.memory is not None
        return InRoom(room, exact.memory, exact)
    chunks = [memory(step) for step in rank_steps(solution, rank, prices)]
    # They hold all chunks of the rank; one computes at a time.
    whole = {name: sum(getattr(held, name) for held in chunks) for name in Memory.__slots__}
    bound = Memory(**{**whole, "temporary": max(held.temporary for held in chunks)})
    return InRoom(room, bound, ExactMemory(None, tuple(rank_holdings(solution, rank, prices))))


def search_within(request: PipelineRequest) -> PipelineSolution:
    """The quickest pipeline found whose rehearsed steps are within the limits. Raises what :func:`~.pipeline.search`
    raises.

    What is counted is mostly more than steps hold, and where a few large operations hold most memory it is less. So
    after what counts as much as the limits, what counts less is sought until it fits, then what counts more while that
    may be quicker, as for a step of one pass (:mod:`autopar.planner.within_memory`). A whole step in few microbatches
    is measured within its search."""
    return _Within(request).best()


@dataclass
class _Within:
    """The search for ``request``. ``extra``: the bytes by which what is counted may exceed the limits. ``beyond``: what
    was found last that does not fit, as bytes that are counted and held above the limits; ``within``: as much of what
    fits, but that no less is counted than was allowed. ``free``: seconds of the quickest pipeline, if known."""

    request: PipelineRequest
    extra: float = 0.0
    beyond: Needed | None = None
    within: Needed | None = None
    free: float | None = None
    is_raised: bool = False

    def best(self) -> PipelineSolution:
        found: PipelineSolution | None = None
        for _ in range(ROUNDS):
            try:
                found = self._searched(self.extra)
            except InfeasibleError as error:
                found = self._quickest()
                if found is None and not self._may_fit_above(error):
                    raise
            else:
                self.extra = self._next()
            if found is not None:
                return self._with_more(found)
        most = ", ".join(f"{limit:.0f}" for limit in dict.fromkeys(self.request.limits))
        raise InfeasibleError(f"no pipeline was found whose steps hold at most {most} bytes")

    @property
    def _allowed(self) -> float:
        return min(self.request.limits)

    def _quickest(self) -> PipelineSolution | None:
        """The quickest pipeline, if it fits. Otherwise, and if it counts much too much, None."""
        limits = tuple(PLAUSIBLE * limit for limit in self.request.limits)
        with suppress(InfeasibleError):
            solution = search(replace(self.request, limits=limits, solve=self.request.quickest))
            self.free = solution.seconds
            if self._fits(solution, 0.0):
                return solution
        return None

    def _searched(self, extra: float) -> PipelineSolution | None:
        """The quickest pipeline that counts so many bytes more than the limits, if it fits."""
        limits = tuple(limit + extra for limit in self.request.limits)
        solution = search(replace(self.request, limits=limits))
        return solution if self._fits(solution, extra) else None

    def _fits(self, solution: PipelineSolution, extra: float) -> bool:
        """Whether a pipeline fits that was found with so many ``extra`` bytes; what it needs is noted."""
        over = held_beyond(solution, self.request.limits)
        counted = max(peak - limit for peak, limit in zip(solution.peaks, self.request.limits, strict=True))
        if over <= 0:
            self.within = Needed(max(counted, extra), over)
        else:
            self.beyond = Needed(counted, over)
        return over <= 0

    def _next(self) -> float:
        """The extra bytes to search with next: as of :func:`.next_limit`."""
        own = (
            None if needed is None else Needed(self._allowed + needed.counted, self._allowed + needed.peak)
            for needed in (self.beyond, self.within)
        )
        return next_limit(self._allowed, *own) - self._allowed

    def _may_fit_above(self, error: InfeasibleError) -> bool:
        """Whether a pipeline may fit though none counts so few bytes. Then it is sought, once, among those that count
        about the fewest."""
        needed = error.needed_bytes
        if needed is None or self.is_raised or self.request.layout.stages == 1 or isinstance(error, TooSlowError):
            return False
        more = min(FULLER * needed, PLAUSIBLE * self._allowed) - self._allowed
        self.is_raised = needed <= PLAUSIBLE * self._allowed and more > self.extra
        self.extra = max(more, self.extra)
        return self.is_raised

    def _with_more(self, best: PipelineSolution) -> PipelineSolution:
        """The quickest of ``best``, which fits, of the quickest pipeline, if that does, and of what is found with more
        extra bytes and fits, while the limits cost time and memory is left."""
        if best.is_one_step or not self._costs(best):
            return best
        if self.free is None:
            within, free = self.within, self._quickest()
            if free is not None:
                return min(best, free, key=lambda own: own.seconds)
            self.within = within
        for _ in range(MORE_ROUNDS):
            extra = self._next()
            if self.within is None or not self._is_worth(best, extra - self.within.counted):
                break
            try:
                found = self._searched(extra)
            except InfeasibleError:
                break
            best = best if found is None else min(best, found, key=lambda own: own.seconds)
        return best

    def _costs(self, best: PipelineSolution) -> bool:
        """Whether the limits may cost time: what ``best`` holds is near them, and pipelines could be quicker."""
        own, ranks = best.uncut.solution, zip(best.peaks, self.request.limits, strict=True)
        if best.layout.stages == 1 and own.objective - best.uncut.unlimited <= self.request.gap * own.objective:
            return False  # There are no other schedules.
        return any(peak >= NEAR * limit for peak, limit in ranks)

    def _is_worth(self, best: PipelineSolution, more: float) -> bool:
        """Whether so many more bytes may make ``best`` quicker by enough."""
        own, gap = best.uncut, self.request.gap
        seconds, free = (own.solution.objective, own.unlimited) if self.free is None else (best.seconds, self.free)
        if more < SPARE * self._allowed or seconds - free <= gap * seconds or free > self.request.best:
            return False
        gained = own.solution.memory_price * more
        return not 0.0 < gained < BUYS_LITTLE * gap * own.solution.objective


def held_beyond(solution: PipelineSolution, limits: Sequence[float]) -> float:
    """The bytes by which a step exceeds the ``limits`` of its ranks. It is rehearsed only if its cost breakdown comes
    near them."""
    ranks = zip(solution.breakdown.peaks, limits, strict=True)
    if not any(peak >= NEAR * limit for peak, limit in ranks):
        return 0.0
    found = exact_stages(solution)
    if found.ranks is None:
        return 0.0
    stages = zip(found.ranks, found.rooms, limits, strict=True)
    return max(counted_peak(rooms, peak(stage)) - limit for stage, rooms, limit in stages)


def fullest(stages: tuple[ExactMemory, ...]) -> int:
    """The rank whose devices have the highest memory peak."""
    return max(range(len(stages)), key=lambda rank: peak(stages[rank]))


def peak(stage: ExactMemory) -> int:
    assert isinstance(stage.memory, Memory)
    return stage.memory.peak


def with_memory(figures: Predicted, stages: ExactStages, rank: int) -> Predicted:
    """``figures`` with the memory of the devices of ``rank``, if it is known better."""
    tightest = stages.tightest(rank)
    exact = None if stages.ranks is None else stages.ranks[rank].memory
    held = exact if tightest is None else tightest.memory
    return figures if held is None else replace(figures, **memory_figures(held))


def _of_rank(solution: PipelineSolution, rank: int, prices: Prices | None = None) -> ExactMemory:
    """The memory of the fullest device of a rank, or of that whose bytes count in ``prices``."""
    program = _program(solution, rank, prices or solution.prices[rank])
    footprint = rehearse(program, solution.cluster.backend)
    holdings = tuple(rank_holdings(solution, rank, prices))
    return of_step(_targets(solution), footprint, holdings, _host(solution, rank))


def _program(solution: PipelineSolution, rank: int, prices: Prices) -> PipelineProgram:
    """The program of the fullest device of ``prices`` on a rank, without results and inputs."""
    breakdown = solution.breakdown
    inside, meshes = prices.fullest, StageMeshes(tuple(own.mesh for own in solution.prices))
    held = breakdown.schedule.held[rank]
    jobs = {
        c: Lowering(
            _without_input_gradients(breakdown.chunks[c].graph),
            breakdown.chunks[c].assignment,
            inside,
            prices.path,
            BUCKET_BYTES,
            prices.messages,
        )
        for c in held
    }
    wires = solution.pipeline.wires
    chunks = {c: lower_chunk(ChunkLowering(job, c, wires, breakdown.schedule, meshes)) for c, job in jobs.items()}
    owners = _owners(solution)
    slots = {slot.target: (slot, owners[slot.target]) for c in held for slot in chunks[c].parameters}
    return PipelineProgram(
        meshes=meshes,
        coordinate=(rank, *inside),
        schedule=breakdown.schedule,
        chunks=chunks,
        parameters=tuple(StagedParameter(slot, (owner,), ()) for slot, owner in slots.values()),
        results=(),
        inputs={},
    )


def _without_input_gradients(graph: Graph) -> Graph:
    return replace(graph, outputs=tuple(o for o in graph.outputs if o.kind != "input_gradient"))


def _owners(solution: PipelineSolution) -> dict[str, int]:
    """The first chunk that uses each parameter, which stores it."""
    owners: dict[str, int] = {}
    for chunk in solution.breakdown.chunks:
        for node in chunk.graph.placeholders("param"):
            owners.setdefault(node.target, chunk.index)
    return owners


def _targets(solution: PipelineSolution) -> dict[str, str]:
    return {n.name: n.target for chunk in solution.breakdown.chunks for n in chunk.graph.placeholders("param")}


def _host(solution: PipelineSolution, rank: int) -> HostMemory:
    """What a rank keeps outside of the device."""
    breakdown, prices, optimizer = solution.breakdown, solution.solutions[rank].prices, solution.optimizer
    shared = shared_parameters(breakdown.chunks, breakdown.schedule.placement, solution.cluster)
    parts = [
        host_memory(
            PlacedStep(
                breakdown.chunks[c].graph,
                breakdown.chunks[c].assignment,
                prices,
                optimizer,
                shared_parameters=shared[c],
            )
        )
        for c in breakdown.schedule.held[rank]
    ]
    held = [breakdown.breakdowns[c].memory for c in breakdown.schedule.held[rank]]
    return HostMemory(sum(m.host for m in held), max(part.visiting for part in parts), sum(m.nvme for m in held))
