"""A pipeline's schedule made to measure: the cut of a named answer, in an order of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.options import SOLVED
from autopar.schedule.named import SCHEDULES
from autopar.schedule.schedule import Schedule

from .pipeline import PipelineSolution
from .pipeline_breakdown import PipelineBreakdown, price_stages, wire_prices
from .pipeline_record import planned_pipeline
from .rehearsed_memory import held_beyond
from .schedule_cpsat import MOST_COMPUTATIONS, computations
from .schedule_solver import SolvedSchedule, solve_schedule

# An order of its own must save this share of the step, unless it is asked for.
# Chosen: as Options.gap; a named order is easier to read and to trust.
WORTH = 0.01
# Deterministic seconds for the solver; most pipelines it can solve at all take less.
# Two of the 17 solved in benchmarks/results/schedules.json took longer than two seconds.
MOST_SECONDS = 5.0


@dataclass(frozen=True)
class Measure:
    """How to look for a schedule. ``asked``: by name, so that any gain is taken, and none is said."""

    asked: bool
    memory_limit: float
    time_limit: float
    seed: int


def with_solved_schedule(made: PipelineSolution, measure: Measure) -> tuple[PipelineSolution, str]:
    """``made`` under a schedule of its own if that is quicker and fits, else ``made``, and why (empty if it was not
    asked for)."""
    schedule = made.pipeline.schedule
    small = computations(schedule.placement, schedule.microbatches) <= MOST_COMPUTATIONS
    if not measure.asked and (schedule.stages == 1 or not small):
        return made, ""
    try:
        solved = _solve(made, measure)
    except InfeasibleError:
        return made, _kept(made, "nothing else was found within the memory") if measure.asked else ""
    least = made.seconds * (1.0 if measure.asked else 1.0 - WORTH)
    breakdown = _price_under(made, solved.schedule)
    if (
        breakdown.seconds < least
        and max(breakdown.peaks) <= measure.memory_limit
        and solved.schedule.name not in SCHEDULES
    ):
        pipeline = planned_pipeline(made.pipeline.cuts, breakdown, made.pipeline.wires, made.whole.prices)
        better = replace(made, breakdown=breakdown, pipeline=pipeline)
        if held_beyond(better, measure.memory_limit) <= 0:
            return better, ""
    found = f"nothing quicker was found ({solved.status}; no schedule saves more than {solved.gap:.1%})"
    return made, _kept(made, found) if measure.asked else ""


def _solve(made: PipelineSolution, measure: Measure) -> SolvedSchedule:
    """The temporaries of what computes are not in the simulated bytes, so they are taken off the limit."""
    breakdown, schedule = made.breakdown, made.pipeline.schedule
    limits = tuple(
        measure.memory_limit - max(breakdown.breakdowns[c].memory.temporary for c in held) for held in schedule.held
    )
    seconds = min(measure.time_limit, MOST_SECONDS)
    return solve_schedule(
        breakdown.prices, schedule.placement, schedule.microbatches, schedule.edges, limits, seconds, measure.seed
    )


def _price_under(made: PipelineSolution, schedule: Schedule) -> PipelineBreakdown:
    """The same chunks under ``schedule``."""
    prices, wires = made.whole.prices, made.pipeline.wires
    pairs = tuple(sorted({(edge.source, edge.target) for edge in wires}))
    links = wire_prices(prices.cluster, schedule.placement, math.prod(made.layout.mesh), pairs)
    return price_stages(made.breakdown.chunks, wires, schedule, prices, links, made.whole.instance.optimizer)


def _kept(made: PipelineSolution, why: str) -> str:
    return f"schedule={SOLVED!r}: {made.pipeline.schedule.name} is kept, {why}"
