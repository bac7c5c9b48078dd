"""From a traced model to the best answer on one mesh: annotate, price, solve until what is found fits, read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.plan_record import Predicted
from autopar.passes.annotate.annotate import annotate
from autopar.placement.baselines import Baseline, baselines
from autopar.placement.formulation import Instance
from autopar.placement.predicted import predicted
from autopar.placement.prices import Prices
from autopar.solver.problem import Ints, Solution, evaluate, host_binds, memory_of
from autopar.solver.solve import smallest_choices, solve

from .formulate import posed, stretched, widest
from .infeasible import infeasible
from .memory_limit import ROUNDS, Solve, Solved, fits, solve_wide, solve_within, tightened
from .mesh_solution import MeshSolution, peak_bytes, placed_step
from .request import PlanRequest, memory_limit_of
from .time_limit import solve_in_time
from .timings import Timings

BASELINE_GAP = 0.05
# Counted seconds for one baseline. Those of transformers take less than one; that of a recurrent network took 28 s to
# come within the gap, and 4 s to come within twice that.
BASELINE_SECONDS = 4.0
# Counted seconds for the plan of least memory.
SMALLEST_SECONDS = 3.0

SolveAgain = Callable[[Instance, Solution], tuple[Instance, Solution]]


def solve_mesh(
    request: PlanRequest, graph: Graph, timings: Timings
) -> tuple[MeshSolution, dict[str, Predicted | None]]:
    """The best answer on just this mesh, and the baselines priced on it. Raises :class:`InfeasibleError`."""
    annotated, plain = _posed(request, graph, timings)
    with timings.phase("solve"):
        others = [(line, _solve_baseline(request, line.instance, timings)) for line in baselines(plain)]
        possible = [solution for _, solution in others if _is_one(solution)]
        solved = _solved(request, plain, timings, [solution.choices for solution in possible])
        if _is_one(solved.solution):
            solved = _best(solved, [solution for solution in possible if fits(solved.instance, solution)])
    best = _settled(request, annotated, solved, timings)
    with timings.phase("report"):
        priced = {line.name: _priced(request, line, other) for line, other in others}
    return best, priced


def solve_only(request: PlanRequest, graph: Graph, timings: Timings) -> MeshSolution:
    """The best answer on just this mesh, without baselines. Raises :class:`InfeasibleError`."""
    annotated, plain = _posed(request, graph, timings)
    with timings.phase("solve"):
        solved = _solved(request, plain, timings)
    return _settled(request, annotated, solved, timings)


def _posed(request: PlanRequest, graph: Graph, timings: Timings) -> tuple[Graph, Instance]:
    """The annotated graph, and the placement program of it with its layers folded."""
    with timings.phase("annotate"):
        annotated = annotate(graph, request.mesh)
        prices = Prices.of(request.cluster, request.mesh, annotated)
    with timings.phase("price"):
        return annotated, posed(request, annotated, prices)


def _is_one(solution: Solution) -> bool:
    return solution.status != "infeasible"


def _solver(request: PlanRequest, timings: Timings) -> Solve:
    return lambda instance, known: solve_in_time(instance.problem, request.options, timings, known)


def _solve_baseline(request: PlanRequest, instance: Instance, timings: Timings) -> Solution:
    """A baseline is a comparison, not the answer: priced without a memory limit, to a coarser gap than a plan, and with
    little work, which is counted so that it has one price on every machine."""
    problem = replace(instance.problem, memory_limit=math.inf)
    seconds, gap = min(BASELINE_SECONDS, request.options.time_limit), max(request.options.gap, BASELINE_GAP)
    found = solve(problem, time_limit=seconds, gap=gap, seed=request.options.solver_seed, counted=True)
    timings.solving += found.seconds
    return found


def _solved(request: PlanRequest, plain: Instance, timings: Timings, incumbents: Sequence[Ints] = ()) -> Solved:
    """The instance that had to be solved, without or with recomputation, and its solution."""
    run = _solver(request, timings)
    return solve_within(request.options, plain, lambda: widest(request, plain), run, incumbents)


def _best(solved: Solved, others: list[Solution]) -> Solved:
    """The cheapest: a baseline that beats what the solver found in its time is the answer, with the solver's bound."""
    known = solved.solution
    cheapest = min([known, *others], key=lambda s: s.objective)
    if cheapest is known:
        return solved
    cheapest = replace(cheapest, bound=known.bound, status="feasible", seconds=known.seconds)
    return replace(solved, solution=cheapest)


def _settled(request: PlanRequest, annotated: Graph, solved: Solved, timings: Timings) -> MeshSolution:
    """The answer that a solution means, solved again as long as its bill does not fit; if nothing so found fits, the
    plan of least memory may. Raises :class:`InfeasibleError`."""
    found, instance = _fitted(request, annotated, solved, timings)
    if found is None:
        with timings.phase("solve"):
            found = _leanest(instance, float(memory_limit_of(request)))
    elif _memory_binds(request, found, solved.unlimited):
        found = _refined(request, annotated, found, timings)
    return replace(found, unlimited=solved.unlimited)


def _fitted(
    request: PlanRequest, annotated: Graph, solved: Solved, timings: Timings
) -> tuple[MeshSolution | None, Instance]:
    """The answer that fits, and else the widest instance, in which nothing did: solved again with less memory, and with
    layers that may differ if the host's memory is short as well."""
    limit, run, instance = float(memory_limit_of(request)), _solver(request, timings), solved.instance
    again = _with_less(request, run)
    with timings.phase("solve"):
        found = _fitting(instance, solved.solution, limit, again)
        instance = instance if found is not None else widest(request, instance)
    if found is None and host_binds(instance.problem):
        with timings.phase("price"):
            instance = stretched(request, annotated, instance)
        with timings.phase("solve"):
            found = _fitting(instance, solve_wide(instance, run, ()), limit, again)
    return found, instance


def _with_less(request: PlanRequest, run: Solve) -> SolveAgain:
    """Solves an instance whose limit was lowered, from the solution before: with recomputation and offload, if these
    had not been needed so far."""

    def again(less: Instance, before: Solution) -> tuple[Instance, Solution]:
        wide = widest(request, less)
        return wide, run(less, ()) if wide is less else solve_wide(wide, run, [before.choices])

    return again


def _fitting(instance: Instance, solution: Solution, limit: float, again: SolveAgain) -> MeshSolution | None:
    """An answer whose step needs at most ``limit`` bytes: what ``solution`` means, or what solving ``again`` with less
    and less memory finds."""
    for _ in range(ROUNDS):
        if not _is_one(solution):
            return None
        found = MeshSolution.of(instance, solution)
        less = tightened(instance, solution.choices, peak_bytes(found), limit)
        if less is None:
            return found
        instance, solution = again(less, solution)
    return None


def _leanest(instance: Instance, limit: float) -> MeshSolution:
    """The answer of least memory. Raises :class:`InfeasibleError` if that is more than ``limit`` bytes."""
    least = _smallest(instance)
    if least is None:
        raise infeasible(instance, limit)
    peak = peak_bytes(least)
    if peak > limit:
        raise infeasible(instance, limit, peak)
    return least


def _smallest(instance: Instance) -> MeshSolution | None:
    """The answer whose step needs the fewest bytes, as far as is known; None if there is none at all.

    Of all that take the least memory as the program counts it the cheapest is taken: what the program does not count,
    such as the two ends of a needless reshard, is mostly there for nothing. The work for this is counted, so that a
    limit that was named as enough is enough when it is asked for."""
    problem = instance.problem
    choices = smallest_choices(problem)
    if choices is None:
        return None
    tight = replace(problem, memory_limit=memory_of(problem, choices), windows=())
    cheapest = solve(tight, time_limit=SMALLEST_SECONDS, gap=BASELINE_GAP, incumbents=[choices], counted=True)
    found = [
        MeshSolution.of(instance, Solution(c, evaluate(problem, c), 0.0, "feasible", 0.0))
        for c in (cheapest.choices, choices)
    ]
    return min(found, key=peak_bytes)


def _memory_binds(request: PlanRequest, best: MeshSolution, unlimited: float) -> bool:
    """Whether the memory limit costs more than the gap, so that layers that may differ are worth trying.

    A heuristic: what the limit costs is told from the program in which equal layers choose alike by construction.
    Layers that differ, at the ends of the model above all, could be quicker even without a limit."""
    instance, solution = best.instance, best.solution
    folded = len(instance.names) < len(instance.graph.nodes)
    dearer = solution.objective - unlimited > request.options.gap * solution.objective
    return folded and dearer and memory_of(instance.problem, solution.choices) > 0.8 * instance.problem.memory_limit


def _refined(request: PlanRequest, annotated: Graph, best: MeshSolution, timings: Timings) -> MeshSolution:
    """Where memory is short equal layers may differ: solves again with layers tied only within stretches of depth."""
    with timings.phase("price"):
        instance = stretched(request, annotated, best.instance)
    with timings.phase("solve"):
        known = instance.chosen(best.assignment)
        solution = solve_in_time(instance.problem, request.options, timings, [known])
    if not _is_one(solution) or solution.objective >= best.solution.objective:
        return best
    found = MeshSolution.of(instance, solution)
    return found if peak_bytes(found) <= memory_limit_of(request) else best


def _priced(request: PlanRequest, line: Baseline, solution: Solution) -> Predicted | None:
    """The figures of a baseline, as people run it."""
    if not _is_one(solution):
        return None
    found = MeshSolution.of(line.instance, solution)
    bill = line.billed(placed_step(line.instance, found.assignment), found.account)
    return predicted(bill, line.instance, request.cluster)
