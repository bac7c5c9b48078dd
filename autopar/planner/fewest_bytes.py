"""The placements of a program that need the fewest bytes, whatever they cost: what fits if anything does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.placement.formulation import Instance
from autopar.placement.memory_floor import without_waiting
from autopar.planner.steps.exact_memory import is_rehearsed
from autopar.solver.problem import Ints, Problem, Solution, evaluate, host_binds, memory_of
from autopar.solver.shared_reductions import SharedReductions
from autopar.solver.solve import smallest_choices, solve

from .formulate import PROGRAMS
from .infeasible import does_not_fit
from .memory_limit import Needed, with_limit
from .mesh_solution import MeshSolution, peak_bytes
from .peaks import LEAST_NODES
from .request import PlanRequest, memory_limit_of

# The gap to which it is solved what costs least of that. Chosen, as for baselines.
GAP = 0.05
# Counted seconds for the solution of least memory. Chosen, not measured.
SMALLEST_SECONDS = 3.0
# How many times the least counted memory is tried as well, where it does not say what a step holds.
# Chosen: of an MLP on (2, 2), what counts 1.1 times the least holds 0.8 times as much.
MORE_MEMORY = (1.1, 1.3)
# How many times the limit a program counts at least where its step, not rehearsed, needs more without a further look.
# Chosen: the program and the cost breakdown of a step count nearly the same.
FAR_ABOVE = 1.1
# How many times the limit the solution of least memory holds at least where no other is sought that would fit.
# Chosen: of a small transformer on 2 devices, a solution that counts more holds 0.98 times as much.
NEAR = 1.05
# How many times the limit the quickest step holds, where what holds least is looked for before anything else, and how
# many times the limit that holds where nothing will fit; of large steps, of which it takes long to know.
# Chosen: by MORE_MEMORY others may hold 0.8 times as much as that which counts least.
FAR, HOPELESS = 3.0, 1.5


def minimize_memory_within(request: PlanRequest, instance: Instance, least: MeshSolution | None = None) -> MeshSolution:
    """The solution of least memory: ``least``, if it is known. Raises :class:`InfeasibleError`, not yet explained, if
    it needs more than the request allows."""
    limit = float(memory_limit_of(request))
    if not is_rehearsed(instance) and (counted := _least_counted(request, instance)) > FAR_ABOVE * limit:
        raise does_not_fit(request, instance, limit, _enough(request, instance, counted))
    least = least_of(request, instance) if least is None else least
    peak = None if least is None else peak_bytes(least)
    if least is None or peak is None or peak > limit:
        raise does_not_fit(request, instance, limit, peak)
    return least


def _least_counted(request: PlanRequest, instance: Instance) -> float:
    """The fewest bytes that the program counts, infinite if there are none: those of a step that is not rehearsed."""
    choices = _smallest(request, instance)
    return math.inf if choices is None else memory_of(instance.problem, choices)


def _enough(request: PlanRequest, instance: Instance, counted: float) -> int | None:
    """Bytes in which the solution of fewest counted ones fits; None if there is none. Of stages about as many: what
    they are cut from counts, and only whole pipelines tell."""
    choices = _smallest(request, instance)
    if choices is None or request.repeats.stages > 1:
        return None if choices is None else math.ceil(counted)

    def make() -> int:
        return peak_bytes(_counting(instance, counted, choices))

    of = instance.graph, instance.prices, instance.choices
    return request.shared.once("enough", of, make=make, kept=PROGRAMS)


def _smallest(request: PlanRequest, instance: Instance) -> Ints | None:
    of = instance.graph, instance.prices, instance.choices
    return request.shared.once("smallest", of, make=lambda: smallest_choices(instance.problem), kept=PROGRAMS)


def may_fit_at_least(request: PlanRequest, instance: Instance) -> bool:
    """Whether the solution of least memory fits or nearly does. True where that takes long to know, or if the host's
    memory is short: then layers are untied if nothing else fits."""
    limit, choices = float(memory_limit_of(request)), _smallest(request, instance)
    if choices is None or len(instance.graph) >= LEAST_NODES or host_binds(instance.problem):
        return True
    counted = memory_of(instance.problem, choices)
    if not is_rehearsed(instance) and counted > FAR_ABOVE * limit:
        return False
    if peak_bytes(_counting(instance, counted, choices)) <= NEAR * limit:
        return True  # What needs the fewest bytes needs no more than what counts the fewest.
    least = least_of(request, instance)
    return least is None or peak_bytes(least) <= NEAR * limit


def least_if_far(request: PlanRequest, instance: Instance, beyond: Needed | None) -> MeshSolution | None:
    """The solution of least memory, if it is looked for before any other that fits: of small steps that are rehearsed
    this is soon known, of others only where the limit is far. ``beyond``: what the quickest needs, if there is one.
    Raises :class:`InfeasibleError`, not yet explained, if it shows that nothing will fit."""
    if beyond is None or host_binds(instance.problem):
        return None
    limit = float(memory_limit_of(request))
    if is_rehearsed(instance) and len(instance.graph) < LEAST_NODES:
        return None if may_fit_at_least(request, instance) else minimize_memory_within(request, instance)
    least = least_of(request, instance) if beyond.peak > FAR * limit else None
    if least is not None and peak_bytes(least) > HOPELESS * limit:
        return minimize_memory_within(request, instance, least)
    return least


def least_of(request: PlanRequest, instance: Instance) -> MeshSolution | None:
    """:func:`minimize_memory`, once for all limits. A program has choices of its own, which its copies share."""
    of = instance.graph, instance.prices, instance.choices
    return request.shared.once("least memory", of, make=lambda: minimize_memory(instance), kept=PROGRAMS)


def minimize_memory(instance: Instance) -> MeshSolution | None:
    """The solution found whose step needs the fewest bytes; None if there is no solution.

    Among solutions of least memory, as the program counts it, this takes the cheapest: memory that the program does
    not count, such as both ends of a needless reshard, mostly comes from needless work. For the same reason what counts
    a little more may hold less. The solver's work is counted, so that a limit that an error names as sufficient is
    sufficient when it is requested."""
    choices = smallest_choices(instance.problem)
    if choices is None:
        return None
    if not is_rehearsed(instance) or len(instance.graph) >= LEAST_NODES:
        # Where the step is not rehearsed, the fewest bytes are those that the program counts.
        return min(_cheapest(instance, instance.problem, choices, (1.0,)), key=peak_bytes)
    other, found = without_waiting(instance), list[MeshSolution]()
    if other is not instance.problem:
        found += _cheapest(instance, instance.problem, choices, (1.0,))
        choices = smallest_choices(other)
    found += [] if choices is None else _cheapest(instance, other, choices, (1.0, *MORE_MEMORY))
    return min(found, key=peak_bytes)


def _cheapest(instance: Instance, problem: Problem, least: Ints, times: Sequence[float]) -> Iterator[MeshSolution]:
    """The solution of ``least`` memory of a ``problem`` of ``instance``, and the cheapest that need so many ``times``
    that."""
    known, counted = SharedReductions(), memory_of(problem, least)
    yield _counting(instance, memory_of(instance.problem, least), least)
    for more in times:
        within = replace(problem, memory_limit=more * counted, memory_price=0.0, windows=())
        cheapest = solve(
            within, time_limit=SMALLEST_SECONDS, gap=GAP, incumbents=[least], counted=True, reductions=known
        )
        yield _counting(instance, memory_of(instance.problem, cheapest.choices), cheapest.choices)


def _counting(instance: Instance, limit: float, choices: Ints) -> MeshSolution:
    """The solution of ``choices``, which count at most so many bytes."""
    solution = Solution(choices, evaluate(instance.problem, choices), 0.0, "feasible", 0.0)
    return MeshSolution.of(with_limit(instance, limit), solution)
