"""Measures the memory of every stage of a planned pipeline, by rehearsing the programs of its ranks; see
:mod:`autopar.planner.steps.exact_memory`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from autopar.planner.mesh_solution import COUNTED_AT_MOST, InRoom, counted_peak, peak_bytes
from autopar.planner.peaks import NEAR
from autopar.planner.steps.exact_memory import ExactMemory, of_step, reason_of
from autopar.planner.steps.step_program import without_input_gradients
from autopar.runtime.rehearse.rehearsal import rehearse
from autopar.search.stage_prices.shared_parameters import shared_parameters

from .pipeline_predicted import rank_holdings, rank_steps
from .pipeline_solution import PipelineSolution
from .stage_meshes import StageLayout

# The most operations that a rehearsal may run in all. Larger pipelines keep the estimate of their cost breakdown.
# Chosen: what a search may wait for; not measured.
EFFORT = 40_000


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


def is_soon_rehearsed(layout: StageLayout, graph: Graph, microbatches: int) -> bool:
    """Whether pipelines of so many microbatches of ``graph`` are rehearsed while they are sought, and their programs'
    limits are sought by what they hold: not of unequal stages, of which each has a program that counts for itself."""
    is_alike = layout.stages > 1 and not layout.is_unequal
    return is_alike and bool(graph.gradients) and len(graph) * microbatches <= EFFORT


def peaks_of(solution: PipelineSolution) -> tuple[int, ...]:
    """Peak bytes of each pipeline rank's devices, as rehearsed; as counted where that takes too long or failed. Of
    several rooms, as they count in the smallest."""
    found = exact_stages(solution)
    if found.ranks is None:
        return (peak_bytes(solution.uncut),) if solution.is_one_step else solution.breakdown.peaks
    return tuple(counted_peak(rooms, peak(stage)) for stage, rooms in zip(found.ranks, found.rooms, strict=True))


def peaks_within(solution: PipelineSolution, limits: Sequence[float]) -> tuple[int, ...]:
    """:func:`peaks_of`, or what is counted if that leaves no doubt whether it is within the ``limits`` of ranks."""
    counted = solution.breakdown.peaks
    shares = [count / limit if limit > 0 else math.inf for count, limit in zip(counted, limits, strict=True)]
    is_open = max(shares) >= NEAR and (max(shares) <= COUNTED_AT_MOST or solution.is_one_step)
    return peaks_of(solution) if is_open else counted


def fits(solution: PipelineSolution, limits: Sequence[float], host_limit: float = math.inf) -> bool:
    """Whether every rank is within the ``limits`` of its devices, as rehearsed, and of its host."""
    if solution.breakdown.host_bytes > host_limit:
        return False
    return all(held <= limit for held, limit in zip(peaks_within(solution, limits), limits, strict=True))


@dataclass(frozen=True, order=True)
class Overfull:
    """The rank that exceeds its limit most: ``bytes`` for each of its devices are ``share`` of the ``limit``."""

    share: float = math.inf
    bytes: int = 0
    limit: float = math.inf

    @staticmethod
    def of(solution: PipelineSolution, limits: Sequence[float]) -> Overfull:
        ranks = zip(peaks_within(solution, limits), limits, strict=True)
        return max(Overfull(peak / limit if limit > 0 else math.inf, peak, limit) for peak, limit in ranks)


# Of what was not tried.
INFINITE = Overfull()


def counted_beyond(solution: PipelineSolution) -> tuple[float, ...]:
    """By rank, the bytes by which the cost breakdown counts more than is held: what the limits of what is counted may
    exceed those of what is held."""
    counted = solution.breakdown.peaks
    return tuple(float(count - held) for count, held in zip(counted, peaks_of(solution), strict=True))


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
            without_input_gradients(breakdown.chunks[c].graph),
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
