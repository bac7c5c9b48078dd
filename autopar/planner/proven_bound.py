"""The bound of a solution under a limit of memory, of all steps that fit."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.placement.memory_floor import Moment, held_at_least
from autopar.solver.problem import memory_of
from autopar.solver.solve import solve

from .formulate import with_memory_savers
from .memory_limit import Unlimited, with_limit
from .mesh_solution import MeshSolution
from .request import PlanRequest, memory_limit_of
from .timings import Timings

MOMENTS: tuple[Moment, ...] = ("forward", "backward")
# The share of the gap to which the program is solved that counts what steps hold at least, and its counted seconds.
# Chosen: its own gap adds to that of the plan; the linear relaxation, which they leave out, raised the bound of GPT-3
# by 0.02%.
TO_GAP, FLOOR_SECONDS = 0.25, 4.0


def with_bound(request: PlanRequest, best: MeshSolution, free: Unlimited, timings: Timings) -> MeshSolution:
    """A solution under a limit with a bound of all that fits. The program with a limit proves nothing of what it counts
    as too large and would fit, which there may be where steps are rehearsed. Then the bound is that without a limit or,
    if its gap is too wide, that with a limit for what any step holds at least. Where equal layers choose alike it is
    not: what fits may be quicker that has some layers in shards and others whole."""
    solution, unlimited = best.solution, free.seconds
    is_counted = best.step.memory.memory is None or not math.isfinite(unlimited)
    bound = min(max(solution.bound, unlimited) if is_counted else unlimited, solution.objective)
    is_of_all = not best.prices.rooms and not _ties_layers(free)
    if not is_counted and is_of_all and replace(solution, bound=bound).gap > request.options.gap:
        with timings.phase("solve"):
            bound = min(max(bound, _bound_of_what_fits(request, best, free, timings)), solution.objective)
    proven = replace(solution, bound=bound)
    status = "optimal" if proven.gap <= request.options.gap else "feasible"
    return replace(best, solution=replace(proven, status=status), unlimited=unlimited)


def _ties_layers(free: Unlimited) -> bool:
    classes = free.instance.graph.classes
    return len(set(classes.values())) < len(classes)


def _bound_of_what_fits(request: PlanRequest, best: MeshSolution, free: Unlimited, timings: Timings) -> float:
    """Seconds that no step takes less than which fits: by what it holds at least, at the moment at which ``best`` holds
    more. It is searched for no further than to the gap."""
    wide = with_memory_savers(request, with_limit(free.instance, float(memory_limit_of(request))))
    chosen = wide.chosen(best.assignment)
    problem = max((held_at_least(wide, moment) for moment in MOMENTS), key=lambda own: memory_of(own, chosen))
    worth = (1.0 - request.options.gap) * best.solution.objective
    proven = solve(
        replace(problem, memory_price=best.solution.memory_price),
        time_limit=min(timings.left(request.options) / 2, FLOOR_SECONDS),
        gap=TO_GAP * request.options.gap,
        seed=request.options.solver_seed,
        incumbents=[chosen],
        counted=timings.counts(request.options),
        worth=worth,
    )
    timings.solving += proven.seconds
    return proven.bound if math.isfinite(proven.bound) else -math.inf
