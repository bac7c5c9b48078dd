"""The bound of a solution under a limit of memory, of all steps that fit."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.placement.formulation import Instance, copies_of
from autopar.placement.memory_floor import Moment, held_at_least
from autopar.planner.steps.exact_memory import is_rehearsed
from autopar.solver.budget import Budget
from autopar.solver.overlap_prices import at_prices
from autopar.solver.problem import Ints, Problem, memory_of, sides_of
from autopar.solver.solve import solve
from autopar.solver.untied_dual import untied_bound

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
# Counted seconds for the bound of steps whose layers may differ. Chosen: that of GPT-3 is then within 0.1% of the
# highest there is, and twice as many raised it by 0.05%.
UNTIED_SECONDS = 1.6
# A bound that is just enough for the gap is enough after rounding too.
ABOVE_ROUNDING = 1.0 + 1e-9


def with_bound(request: PlanRequest, best: MeshSolution, free: Unlimited, timings: Timings) -> MeshSolution:
    """A solution under a limit with a bound of all that fits. The program with a limit proves nothing of what it counts
    as too large and would fit, which there may be where steps are rehearsed. Then the bound is that without a limit or,
    if its gap is too wide, that with a limit for what any step holds at least. The latter is one of all steps, also of
    those whose equal layers differ: what fits may be quicker that has some layers in shards and others whole."""
    solution, unlimited = best.solution, free.seconds
    is_counted = not is_rehearsed(best.instance) or not math.isfinite(unlimited)
    bound = min(max(solution.bound, unlimited) if is_counted else unlimited, solution.objective)
    if not is_counted and not best.prices.rooms and replace(solution, bound=bound).gap > request.options.gap:
        with timings.phase("solve"):
            bound = min(max(bound, _bound_of_what_fits(request, best, free, timings)), solution.objective)
    proven = replace(solution, bound=bound)
    status = "optimal" if proven.gap <= request.options.gap else "feasible"
    return replace(best, solution=replace(proven, status=status), unlimited=unlimited)


def _bound_of_what_fits(request: PlanRequest, best: MeshSolution, free: Unlimited, timings: Timings) -> float:
    """Seconds that no step takes less than which fits, by what it holds at least. It is searched for no further than to
    the gap."""
    wide = with_memory_savers(request, with_limit(free.instance, float(memory_limit_of(request))))
    chosen = wide.chosen(best.assignment)
    problems = [held_at_least(wide, moment) for moment in MOMENTS]
    worth = (1.0 - request.options.gap) * best.solution.objective * ABOVE_ROUNDING
    counted, seed = timings.counts(request.options), request.options.solver_seed
    if len(wide.names) <= len(wide.graph.nodes):  # Groups are of several nodes, and of the outputs.
        budget = Budget(min(timings.left(request.options) / 2, UNTIED_SECONDS), counted)
        quickest = free.solution.choices
        bound = _bound_of_copies(wide, problems, [chosen, quickest], worth, best.solution.memory_price, budget)
        timings.solving += budget.used
        return bound
    proven = solve(
        replace(max(problems, key=lambda own: memory_of(own, chosen)), memory_price=best.solution.memory_price),
        time_limit=min(timings.left(request.options) / 2, FLOOR_SECONDS),
        gap=TO_GAP * request.options.gap,
        seed=seed,
        incumbents=[chosen],
        counted=counted,
        worth=worth,
    )
    timings.solving += proven.seconds
    return proven.bound if math.isfinite(proven.bound) else -math.inf


def _bound_of_copies(
    wide: Instance, problems: list[Problem], known: list[Ints], worth: float, price: float, budget: Budget
) -> float:
    """:func:`_bound_of_what_fits`, where nodes that choose alike in ``wide`` may each choose by itself: by what is held
    at one of the moments of ``problems``. ``known``: the choices of a step that fits, by which messages are hidden, and
    of the quickest. The moment at which the latter holds most comes first; where it fits, nothing is proven."""
    bound, copies = -math.inf, copies_of(wide)
    held = [(memory_of(own, known[1]), own) for own in problems]
    for most, problem in sorted(held, key=lambda pair: -pair[0]):
        if most > problem.memory_limit and budget.left > 0:
            sides = (sides_of(problem, window, known[0]) for window in problem.windows)
            plain = at_prices(problem, [1.0 if messages > computing else 0.0 for messages, computing in sides])
            found = untied_bound(plain, copies, enough=worth, budget=budget, known=known, first_price=price)
            bound = max(bound, found)
    return bound
