"""Improves a solved pipeline by a schedule that is solved for its chunks. The cuts stay those of the named schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.errors import InfeasibleError
from autopar.options import SOLVED
from autopar.schedule.named import SCHEDULES
from autopar.schedule.schedule import Schedule
from autopar.search.schedules.schedule_size import MOST_COMPUTATIONS, computations
from autopar.search.stage_prices.pipeline_breakdown import PipelineBreakdown, price_stages, wire_prices

from .pipeline_solution import PipelineSolution, planned_pipeline
from .rehearsed_memory import counted_beyond, fits

if TYPE_CHECKING:
    from autopar.search.schedules.schedule_solver import SolvedSchedule

# A solved schedule must save this share of the step, unless it is requested.
# Chosen: as Options.gap; a named order is easier to read and to trust.
WORTH = 0.01
# Deterministic seconds for the solver. Most pipelines that it can solve at all take less.
# Two of the 17 solved in benchmarks/results/schedules.json took longer than two seconds.
MOST_SECONDS = 5.0


@dataclass(frozen=True)
class ScheduleSearch:
    """How to search for a schedule. ``requested``: the options ask for it; then any gain is taken, and a note says so
    if there is none. ``limits``: bytes for each device, by pipeline rank."""

    requested: bool
    limits: tuple[float, ...]
    time_limit: float
    seed: int


def with_solved_schedule(solution: PipelineSolution, search: ScheduleSearch) -> tuple[PipelineSolution, str]:
    """``solution`` under a solved schedule if that is quicker and fits. Otherwise ``solution`` itself, and a note that
    says why (empty if no solved schedule was requested)."""
    schedule = solution.pipeline.schedule
    small = computations(schedule.placement, schedule.microbatches) <= MOST_COMPUTATIONS
    if not search.requested and (schedule.stages == 1 or not small):
        return solution, ""
    try:
        solved = _solve(solution, search)
    except InfeasibleError:
        return solution, _kept(solution, "nothing else was found within the memory") if search.requested else ""
    least = solution.seconds * (1.0 if search.requested else 1.0 - WORTH)
    breakdown = _price_under(solution, solved.schedule)
    if breakdown.seconds < least and solved.schedule.name not in SCHEDULES:
        before = solution.pipeline
        pipeline = planned_pipeline(
            before.cuts, breakdown, before.wires, solution.prices, before.own_statistics, solution.cluster
        )
        better = replace(solution, breakdown=breakdown, pipeline=pipeline)
        if fits(better, search.limits):
            return better, ""
    reason = f"nothing quicker was found ({solved.status}; no schedule saves more than {solved.gap:.1%})"
    return solution, _kept(solution, reason) if search.requested else ""


def _solve(solution: PipelineSolution, search: ScheduleSearch) -> SolvedSchedule:
    """Solves for a schedule. The simulated bytes do not include temporaries, so these are subtracted from the
    limits."""
    from autopar.search.schedules.schedule_solver import (
        solve_schedule,  # Here, since it loads CP-SAT, which few plans need.
    )

    breakdown, schedule = solution.breakdown, solution.pipeline.schedule
    # What a rank holds by its rehearsal, though more is counted, it may count.
    is_within = all(peak <= limit for peak, limit in zip(breakdown.peaks, search.limits, strict=True))
    beyond = (0.0,) * schedule.stages if is_within else counted_beyond(solution)
    limits = tuple(
        limit + more - max(breakdown.breakdowns[c].memory.temporary for c in held)
        for limit, more, held in zip(search.limits, beyond, schedule.held, strict=True)
    )
    seconds = min(search.time_limit, MOST_SECONDS)
    return solve_schedule(
        breakdown.prices, schedule.placement, schedule.microbatches, schedule.edges, limits, seconds, search.seed
    )


def _price_under(solution: PipelineSolution, schedule: Schedule) -> PipelineBreakdown:
    """The cost breakdown of the same chunks under ``schedule``."""
    wires, cluster = solution.pipeline.wires, solution.cluster
    pairs = tuple(sorted({(edge.source, edge.target) for edge in wires}))
    links = wire_prices(cluster, schedule.placement, solution.layout.blocks, pairs)
    chunks = solution.breakdown.chunks
    return price_stages(chunks, wires, schedule, solution.prices, links, solution.optimizer, cluster)


def _kept(solution: PipelineSolution, reason: str) -> str:
    return f"schedule={SOLVED!r}: {solution.pipeline.schedule.name} is kept, {reason}"
