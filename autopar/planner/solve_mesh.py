"""From a step's graph to the best solution on one mesh: annotates, prices, and solves until the solution fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autopar.ir.graph import Graph
from autopar.ir.plan_record import Predicted
from autopar.passes.annotate.annotate import annotate
from autopar.placement.baselines import Baseline, baselines
from autopar.placement.formulation import Instance
from autopar.placement.predicted import predicted
from autopar.placement.prices import Prices
from autopar.restriction import words_of
from autopar.solver.problem import Ints, Solution, evaluate, host_binds, memory_of
from autopar.solver.solve import smallest_choices, solve

from .formulate import formulate, untie_layers, with_memory_savers
from .infeasible import does_not_fit
from .memory_limit import ROUNDS, Solve, Solved, TooSlowError, fits, solve_wide, solve_within, tightened, without_limit
from .mesh_solution import MeshSolution, peak_bytes, placed_step
from .request import PlanRequest, host_limit_of, kernels_of, memory_limit_of
from .time_limit import solve_in_time
from .timings import Timings

# Chosen: a baseline is compared with, and five times Options.gap is solved much sooner.
BASELINE_GAP = 0.05
# Counted seconds for one baseline. Baselines of transformers take less than one second. That of a recurrent network
# took 28 s to come within the gap, and 4 s to come within twice the gap.
BASELINE_SECONDS = 4.0
# Counted seconds for the solution of least memory.
# Chosen, not measured.
SMALLEST_SECONDS = 3.0

# Programs that are kept, with what is known of each: those of two meshes or restrictions. Chosen: each is large.
PROGRAMS = 2

# The most nodes of a graph whose layers may differ. Chosen: the program of 16,000 nodes, untied, took a third of all
# planning (GPT of 128 layers).
UNTIED_NODES = 10_000

SolveAgain = Callable[[Instance, Solution], tuple[Instance, Solution]]


def solve_mesh(
    request: PlanRequest, graph: Graph, timings: Timings
) -> tuple[MeshSolution, dict[str, Predicted | None]]:
    """The best solution on just this mesh, and the baselines priced on it, none under a layout. Raises
    :class:`InfeasibleError`, which is to be explained (``error.explained``) where it is shown, and of which
    :class:`TooSlowError` is one."""
    annotated, program = _formulate(request, graph, timings)
    with timings.phase("solve"):
        compared = _solve_baselines(request, program, timings)
        feasible = [solution for _, solution in compared if _is_feasible(solution)]
        solved = _solve_within_memory(request, program, timings, [solution.choices for solution in feasible])
        if _is_feasible(solved.solution):
            solved = _take_cheapest(solved, [solution for solution in feasible if fits(solved.instance, solution)])
    best = _enforce_memory_limit(request, annotated, solved, timings)
    return best, priced_baselines(request, graph, timings)


def priced_baselines(request: PlanRequest, graph: Graph, timings: Timings) -> dict[str, Predicted | None]:
    """The baselines on just this mesh, by name; None: not possible."""
    _, program = _formulate(request, graph, timings)
    with timings.phase("solve"):
        compared = _solve_baselines(request, program, timings)
    with timings.phase("report"):
        return {line.name: _price_baseline(request, line, solution) for line, solution in compared}


def solve_only(request: PlanRequest, graph: Graph, timings: Timings) -> MeshSolution:
    """The best solution on just this mesh, without baselines. Raises :class:`InfeasibleError`."""
    annotated, program = _formulate(request, graph, timings)
    with timings.phase("solve"):
        solved = _solve_within_memory(request, program, timings)
    return _enforce_memory_limit(request, annotated, solved, timings)


def is_short_of_memory(request: PlanRequest, solved: MeshSolution) -> bool:
    """Whether the memory limit costs more than the gap; where that is not known, whether memory is nearly full."""
    if math.isfinite(solved.unlimited):
        objective = solved.solution.objective
        return objective - solved.unlimited > request.options.gap * objective
    # Chosen, not measured.
    return peak_bytes(solved) > 0.8 * memory_limit_of(request)


def _formulate(request: PlanRequest, graph: Graph, timings: Timings) -> tuple[Graph, Instance]:
    """Returns the annotated graph and its placement program, with layers folded, without a limit of the device's
    memory."""
    once, mesh, cluster, shares = request.shared.once, request.mesh, request.cluster, request.shares
    with timings.phase("annotate"):
        annotated = once("annotated graph", (graph,), mesh, shares, make=lambda: annotate(graph, mesh, shares))
        fused = kernels_of(request, graph)
        of, limits = (annotated, cluster, fused), request.rank_limits if any(shares) else ()
        prices = once("prices", of, mesh, limits, make=lambda: Prices.of(cluster, mesh, annotated, fused, limits))
    options = request.options
    restrictions = tuple(options.pins.items()), options.zero, words_of(options.layout), request.roles
    settings = *restrictions, options.optimizer, request.repeats, host_limit_of(request)

    def make() -> Instance:
        return without_limit(formulate(request, annotated, prices))

    with timings.phase("price"):
        return annotated, once("program", (annotated, prices), *settings, make=make, kept=PROGRAMS)


def _is_feasible(solution: Solution) -> bool:
    return solution.status != "infeasible"


def _solver(request: PlanRequest, timings: Timings) -> Solve:
    """Returns a function that solves an instance. It raises :class:`TooSlowError` if nothing is worth while within the
    memory that the request allows. With less, quicker placements may be missing that the request has."""
    allowed = float(memory_limit_of(request))

    def solve_worth_while(instance: Instance, incumbents: Sequence[Ints]) -> Solution:
        problem = instance.problem
        worth = request.worth if problem.memory_limit >= allowed else math.inf
        solution = solve_in_time(problem, request.options, timings, incumbents, worth=worth)
        if worth <= solution.bound < math.inf:
            raise TooSlowError(f"plans on mesh {request.mesh}", solution.bound)
        return solution

    return solve_worth_while


def _solve_baselines(
    request: PlanRequest, program: Instance, timings: Timings
) -> tuple[tuple[Baseline, Solution], ...]:
    """The baselines of a program with their solutions; none under a layout: what people choose by hand is no plan of
    one that says something else."""
    if request.roles:
        return ()
    options = request.options
    settings = min(BASELINE_SECONDS, options.time_limit), max(options.gap, BASELINE_GAP), options.solver_seed

    def make() -> tuple[tuple[Baseline, Solution], ...]:
        return tuple((line, _solve_baseline(request, line.instance, timings)) for line in baselines(program))

    return request.shared.once("baselines", (program,), *settings, make=make, kept=PROGRAMS)


def _solve_baseline(request: PlanRequest, instance: Instance, timings: Timings) -> Solution:
    """Solves a baseline without a memory limit, to a coarser gap than a plan and with little work: it only serves as a
    comparison. The work is counted, so that a baseline has the same price on every machine."""
    problem = replace(instance.problem, memory_limit=math.inf)
    seconds, gap = min(BASELINE_SECONDS, request.options.time_limit), max(request.options.gap, BASELINE_GAP)
    solution = solve(problem, time_limit=seconds, gap=gap, seed=request.options.solver_seed, counted=True)
    timings.solving += solution.seconds
    return solution


def _solve_within_memory(
    request: PlanRequest, program: Instance, timings: Timings, incumbents: Sequence[Ints] = ()
) -> Solved:
    """Solves without recomputation, and with it only if memory requires it. Returns the instance solved last."""
    plain = replace(program, problem=replace(program.problem, memory_limit=float(memory_limit_of(request))))

    def run(instance: Instance, starts: Sequence[Ints]) -> Solution:
        make = partial(_solver(request, timings), instance, starts)
        if instance.is_wide or math.isfinite(instance.problem.memory_limit):
            return make()
        # One of all requests that differ in the limit alone.
        options, known = request.options, tuple(choices.tobytes() for choices in starts)
        settings = options.gap, options.solver_seed, options.time_limit, timings.counted, known, request.worth
        return request.shared.once("unlimited", (program,), *settings, make=make, kept=PROGRAMS)

    return solve_within(request.options, plain, lambda: with_memory_savers(request, plain), run, incumbents)


def _take_cheapest(solved: Solved, others: list[Solution]) -> Solved:
    """Takes the cheapest solution. A baseline that beats the solver's solution replaces it and retains the solver's
    bound."""
    solution = solved.solution
    cheapest = min([solution, *others], key=lambda s: s.objective)
    if cheapest is solution:
        return solved
    cheapest = replace(cheapest, bound=solution.bound, status="feasible", seconds=solution.seconds)
    return replace(solved, solution=cheapest)


def _enforce_memory_limit(request: PlanRequest, annotated: Graph, solved: Solved, timings: Timings) -> MeshSolution:
    """Solves again until the rehearsed step fits into memory. If none does, takes the solution of least memory. Raises
    :class:`InfeasibleError` if that does not fit either."""
    best, instance = _solve_until_fits(request, annotated, solved, timings)
    if best is None:
        with timings.phase("solve"):
            best = _minimize_memory_within(instance, float(memory_limit_of(request)))
    elif _memory_binds(request, best, solved.unlimited):
        best = _refine_untied(request, annotated, best, timings)
    return replace(best, unlimited=solved.unlimited)


def _solve_until_fits(
    request: PlanRequest, annotated: Graph, solved: Solved, timings: Timings
) -> tuple[MeshSolution | None, Instance]:
    """Returns a solution that fits, or None with the largest instance that was tried. Solves again with less memory,
    and with untied layers if the host's memory is short as well."""
    limit, run, instance = float(memory_limit_of(request)), _solver(request, timings), solved.instance
    solve_again = _tightened_solver(request, run)
    with timings.phase("solve"):
        fitting = _tighten_until_fits(instance, solved.solution, limit, solve_again)
        instance = instance if fitting is not None else with_memory_savers(request, instance)
    if fitting is None and host_binds(instance.problem):
        with timings.phase("price"):
            instance = untie_layers(request, annotated, instance)
        with timings.phase("solve"):
            fitting = _tighten_until_fits(instance, solve_wide(instance, run, ()), limit, solve_again)
    return fitting, instance


def _tightened_solver(request: PlanRequest, run: Solve) -> SolveAgain:
    """Returns a function that solves an instance with a lower limit, starting from the last solution. It adds
    recomputation and offload if the instance lacks them."""

    def solve_again(less: Instance, before: Solution) -> tuple[Instance, Solution]:
        wide = with_memory_savers(request, less)
        return wide, run(less, ()) if wide is less else solve_wide(wide, run, [before.choices])

    return solve_again


def _tighten_until_fits(
    instance: Instance, solution: Solution, limit: float, solve_again: SolveAgain
) -> MeshSolution | None:
    """Returns a solution whose step needs at most ``limit`` bytes: ``solution`` itself, or one that ``solve_again``
    finds with less and less memory. None if there is none."""
    for _ in range(ROUNDS):
        if not _is_feasible(solution):
            return None
        mesh_solution = MeshSolution.of(instance, solution)
        tighter = tightened(instance, solution.choices, peak_bytes(mesh_solution), limit)
        if tighter is None:
            return mesh_solution
        instance, solution = solve_again(tighter, solution)
    return None


def _minimize_memory_within(instance: Instance, limit: float) -> MeshSolution:
    """The solution of least memory. Raises :class:`InfeasibleError`, not yet explained, if it needs more than ``limit``
    bytes."""
    least = _minimize_memory(instance)
    peak = None if least is None else peak_bytes(least)
    if least is None or peak is None or peak > limit:
        raise does_not_fit(instance, limit, peak)
    return least


def _minimize_memory(instance: Instance) -> MeshSolution | None:
    """The solution found whose step needs the fewest bytes; None if there is no solution.

    Among solutions of least memory, as the program counts it, this takes the cheapest: memory that the program does
    not count, such as both ends of a needless reshard, mostly comes from needless work. The solver's work is counted,
    so that a limit that an error names as sufficient is sufficient when it is requested."""
    problem = instance.problem
    choices = smallest_choices(problem)
    if choices is None:
        return None
    tight = replace(problem, memory_limit=memory_of(problem, choices), windows=())
    cheapest = solve(tight, time_limit=SMALLEST_SECONDS, gap=BASELINE_GAP, incumbents=[choices], counted=True)
    candidates = [
        MeshSolution.of(instance, Solution(c, evaluate(problem, c), 0.0, "feasible", 0.0))
        for c in (cheapest.choices, choices)
    ]
    return min(candidates, key=peak_bytes)


def _memory_binds(request: PlanRequest, best: MeshSolution, unlimited: float) -> bool:
    """Whether the memory limit costs more than the gap, so that layers that may differ are worth trying.

    A heuristic: the cost of the limit comes from the program whose equal layers choose alike by construction. Layers
    that differ, mostly at the ends of the model, could be faster even without a limit."""
    instance, solution = best.instance, best.solution
    folded = len(instance.names) < len(instance.graph.nodes) <= UNTIED_NODES
    limit_costs = solution.objective - unlimited > request.options.gap * solution.objective
    # A limit that is far away is not what costs. Chosen, not measured.
    return (
        folded and limit_costs and memory_of(instance.problem, solution.choices) > 0.8 * instance.problem.memory_limit
    )


def _refine_untied(request: PlanRequest, annotated: Graph, best: MeshSolution, timings: Timings) -> MeshSolution:
    """Solves again with layers tied only within stretches of depth. Used where memory is short."""
    with timings.phase("price"):
        instance = untie_layers(request, annotated, best.instance)
    with timings.phase("solve"):
        incumbent = instance.chosen(best.assignment)
        solution = solve_in_time(instance.problem, request.options, timings, [incumbent])
    if not _is_feasible(solution) or solution.objective >= best.solution.objective:
        return best
    refined = MeshSolution.of(instance, solution)
    return refined if peak_bytes(refined) <= memory_limit_of(request) else best


def _price_baseline(request: PlanRequest, line: Baseline, solution: Solution) -> Predicted | None:
    """Predicts a baseline as it is run in practice."""
    if not _is_feasible(solution):
        return None
    solved = MeshSolution.of(line.instance, solution)
    breakdown = line.as_run(placed_step(line.instance, solved.assignment), solved.breakdown)
    return predicted(breakdown, line.instance, request.cluster)
