"""The memory of every stage of a planned pipeline, by rehearsing what its ranks run; see
:mod:`autopar.planner.rehearsed_memory`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram, StagedParameter
from autopar.ir.plan_record import Predicted
from autopar.passes.lower.lower import Lowering
from autopar.passes.lower.lower_chunk import ChunkLowering, lower_chunk
from autopar.placement.memory_bound import HostMemory, Memory, host_memory
from autopar.placement.placed_step import PlacedStep
from autopar.placement.predicted import memory_figures
from autopar.placement.prices import BUCKET_BYTES
from autopar.planner.rehearsed_memory import ExactMemory, of_step, reason_of
from autopar.runtime.rehearse.rehearsal import rehearse

from .pipeline import PipelineRequest, PipelineSolution, search
from .pipeline_predicted import rank_holdings
from .shared_parameters import shared_parameters

# Operations that a rehearsal may run in all: beyond, the cost breakdown stands.
# Chosen: what a search may wait for; not measured.
EFFORT = 40_000
# How often a pipeline is sought again with less memory, and from which part of the limit on it is looked at closely.
# Chosen: a rehearsal takes longer than a price, and a price is not wrong by half.
ROUNDS, NEAR = 4, 0.5


@dataclass(frozen=True)
class ExactStages:
    """For each pipeline rank the memory of its devices at their peak. ``ranks`` is None where a rehearsal would take
    too long or failed; of what failed ``warnings`` says why."""

    ranks: tuple[ExactMemory, ...] | None
    warnings: tuple[str, ...] = ()


def exact_stages(solution: PipelineSolution) -> ExactStages:
    """The memory of the stages of ``solution``, by rehearsing the program of the first device of each."""
    schedule = solution.breakdown.schedule
    if sum(len(chunk.graph) for chunk in solution.breakdown.chunks) * schedule.microbatches > EFFORT:
        return ExactStages(None)
    try:
        return ExactStages(tuple(_of_rank(solution, rank) for rank in range(schedule.stages)))
    except Exception as error:  # Any operation may have no form for tensors without data: the cost breakdown stands.
        said = f"memory of stages is an estimate: their steps could not be rehearsed ({reason_of(error)})"
        return ExactStages(None, (said,))


def search_within(request: PipelineRequest) -> PipelineSolution:
    """The quickest pipeline whose steps, rehearsed, are within the limit: cost breakdowns may be too low by what only a
    few large operations hold. Raises what :func:`~.pipeline.search` does."""
    limit, allowed = request.memory_limit, request.memory_limit
    for _ in range(ROUNDS):
        made = search(replace(request, memory_limit=allowed))
        over = held_beyond(made, limit)
        if over <= 0:
            return made
        # Another pipeline is wanted, also where the cost breakdown of this one is far within what was allowed.
        # 2% more than what is too much: chosen, so that few rounds are needed.
        allowed = min(allowed - 1.02 * over, max(made.breakdown.peaks) - 1.0)
    raise InfeasibleError(f"no pipeline was found whose steps hold at most {limit:.0f} bytes")


def held_beyond(made: PipelineSolution, limit: float) -> float:
    """By how many bytes a step exceeds ``limit``; looked at closely where the cost breakdown comes near to it."""
    exact = None if max(made.breakdown.peaks) < NEAR * limit else exact_stages(made).ranks
    return 0.0 if exact is None else peak(exact[fullest(exact)]) - limit


def fullest(stages: tuple[ExactMemory, ...]) -> int:
    """The rank whose devices hold most."""
    return max(range(len(stages)), key=lambda rank: peak(stages[rank]))


def peak(stage: ExactMemory) -> int:
    assert isinstance(stage.memory, Memory)
    return stage.memory.peak


def with_memory(figures: Predicted, stages: tuple[ExactMemory, ...]) -> Predicted:
    """``figures`` with the memory of the fullest rank's devices."""
    memory = stages[fullest(stages)].memory
    assert memory is not None
    return replace(figures, **memory_figures(memory))


def _of_rank(solution: PipelineSolution, rank: int) -> ExactMemory:
    program = _program(solution, rank)
    found = rehearse(program, solution.whole.prices.cluster.backend)
    return of_step(_targets(solution), found, tuple(rank_holdings(solution, rank)), _host(solution, rank))


def _program(solution: PipelineSolution, rank: int) -> PipelineProgram:
    """What the first device of a rank runs; results and inputs are left out."""
    breakdown, prices = solution.breakdown, solution.whole.prices
    inside = (0,) * len(prices.mesh)
    held = breakdown.schedule.held[rank]
    jobs = {
        c: Lowering(
            _stepping(breakdown.chunks[c].graph), breakdown.chunks[c].assignment, inside, prices.path, BUCKET_BYTES
        )
        for c in held
    }
    wires = solution.pipeline.wires
    chunks = {c: lower_chunk(ChunkLowering(job, c, wires, breakdown.schedule)) for c, job in jobs.items()}
    owners = _owners(solution)
    slots = {slot.target: (slot, owners[slot.target]) for c in held for slot in chunks[c].parameters}
    return PipelineProgram(
        mesh=(breakdown.schedule.stages, *prices.mesh),
        coordinate=(rank, *inside),
        schedule=breakdown.schedule,
        chunks=chunks,
        parameters=tuple(StagedParameter(slot, (owner,), ()) for slot, owner in slots.values()),
        results=(),
        inputs={},
    )


def _stepping(graph: Graph) -> Graph:
    return replace(graph, outputs=tuple(o for o in graph.outputs if o.kind != "input_gradient"))


def _owners(solution: PipelineSolution) -> dict[str, int]:
    """The first chunk that uses each parameter, which stores it."""
    found: dict[str, int] = {}
    for chunk in solution.breakdown.chunks:
        for node in chunk.graph.placeholders("param"):
            found.setdefault(node.target, chunk.index)
    return found


def _targets(solution: PipelineSolution) -> dict[str, str]:
    return {n.name: n.target for chunk in solution.breakdown.chunks for n in chunk.graph.placeholders("param")}


def _host(solution: PipelineSolution, rank: int) -> HostMemory:
    """The optimizer state that a rank leaves in host memory."""
    breakdown, prices, optimizer = solution.breakdown, solution.whole.prices, solution.whole.instance.optimizer
    shared = shared_parameters(breakdown.chunks, breakdown.schedule.placement, prices)
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
    return HostMemory(sum(part.bytes for part in parts), max(part.largest for part in parts))
