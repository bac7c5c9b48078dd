"""From a step's graph to the best solution on one mesh: annotates, prices, and solves until the solution fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE
from autopar.ir.plan_record import Predicted
from autopar.offload import allowed, required
from autopar.placement.baselines import Baseline, baselines
from autopar.placement.formulation import Instance
from autopar.placement.predicted import predicted
from autopar.placement.prices import BUCKET_BYTES, Prices
from autopar.planner.steps.exact_memory import is_rehearsed
from autopar.planner.steps.few_layer_bill import folded_bill
from autopar.plans.views.quantities import duration
from autopar.solver.cost_digest import cost_digest
from autopar.solver.least_memory import least_bound
from autopar.solver.problem import Ints, Solution, host_binds, memory_binds
from autopar.solver.shared_reductions import SharedReductions
from autopar.solver.solve import solve

from .fewest_bytes import least_if_far, minimize_memory_within
from .formulate import PROGRAMS, SOLUTIONS, formulate, untie_layers, with_memory_savers
from .memory_limit import (
    Needed,
    Solve,
    TooSlowError,
    Unlimited,
    next_limit,
    refining_seconds,
    solve_unlimited,
    with_limit,
    without_limit,
)
from .mesh_solution import COUNTED_AT_MOST, MeshSolution, peak_bytes
from .mixed_layers import mix_layers
from .peaks import LEAST_NODES, Peaks
from .proven_bound import with_bound
from .request import PlanRequest, annotated_graph, asked_mesh, folded_graph, host_limit_of, kernels_of, memory_limit_of
from .timings import Timings, solve_in_time
from .within_memory import MetSolutions, WithinMemory, short_of_memory, take_cheapest

# Chosen: a baseline is compared with, and five times Options.gap is solved much sooner.
BASELINE_GAP = 0.05
# A gap that is shown. Chosen: most are within BASELINE_GAP; those of Llamas on meshes of 16 x 8 were 30 to 60%.
WIDE_BASELINE_GAP = 0.15
# Counted seconds for one baseline. Baselines of transformers take less than one second. That of a recurrent network
# took 28 s to come within the gap, and 4 s to come within twice the gap.
BASELINE_SECONDS = 4.0
# How many times what is counted of a baseline its program may hold at most, besides a bucket of gradients that wait for
# others. Chosen: FSDP of a tiny Llama on 256 devices holds 1.04 times as much.
IN_DOUBT = 1.25

# The most nodes of a graph whose layers may differ. Chosen: the program of 16,000 nodes, untied, took a third of all
# planning (GPT of 128 layers).
UNTIED_NODES = 10_000
# How many times the seconds worth while a program takes that is given up although its limit of memory proves nothing.
# Chosen: the limits of further programs are near, and mostly lower: of GPT 1T by 3%, at which steps take as long.
NOT_WORTH = 1.05
# Baselines by name; None: not possible.
Priced = dict[str, Predicted | None]


def solve_mesh(request: PlanRequest, graph: Graph, timings: Timings) -> tuple[MeshSolution, Priced]:
    """The best solution on just this mesh, and the baselines priced on it, none under a layout. Raises
    :class:`InfeasibleError`, which is to be explained (``error.explained``) where it is shown, and of which
    :class:`TooSlowError` is one."""
    annotated, program = _formulate(request, graph, timings)
    compared, free = _solve_free(request, program, timings)
    feasible = [solution for _, solution in compared if _is_feasible(solution)]
    best = _enforce_memory_limit(request, annotated, free, timings, feasible)
    return best, _priced(request, compared, timings)


def least_seconds(request: PlanRequest, graph: Graph, timings: Timings) -> tuple[float, Callable[[], Priced]]:
    """Seconds that steps on just this mesh take at least, however much they hold, and what prices the baselines on it.
    Raises :class:`InfeasibleError`."""
    compared, free = _solve_free(request, _formulate(request, graph, timings)[1], timings)
    return free.seconds, partial(_priced, request, compared, timings)


def _solve_free(
    request: PlanRequest, program: Instance, timings: Timings
) -> tuple[tuple[tuple[Baseline, Solution], ...], Unlimited]:
    """The baselines of a program, and its solution without a limit of memory."""
    with timings.phase("solve"):
        compared = _solve_baselines(request, program, timings)
        starts = [solution.choices for _, solution in compared if _is_feasible(solution)]
        return compared, _solve_unlimited(request, program, timings, starts)


def priced_baselines(request: PlanRequest, graph: Graph, timings: Timings) -> Priced:
    """The baselines on just this mesh, by name; None: not possible."""
    _, program = _formulate(request, graph, timings)
    with timings.phase("solve"):
        compared = _solve_baselines(request, program, timings)
    return _priced(request, compared, timings)


def _priced(request: PlanRequest, compared: Sequence[tuple[Baseline, Solution]], timings: Timings) -> Priced:
    with timings.phase("report"):
        return {_named(line, solution): _price_baseline(request, line, solution) for line, solution in compared}


def _named(line: Baseline, solution: Solution) -> str:
    """The name of a baseline, and what it takes at least if that is far less than what was found."""
    if not _is_feasible(solution) or solution.gap <= WIDE_BASELINE_GAP:
        return line.name
    return f"{line.name}: solved to within {solution.gap:.0%} only, at least {duration(solution.bound)}"


def solve_only(request: PlanRequest, graph: Graph, timings: Timings) -> MeshSolution:
    """The best solution on just this mesh, without baselines. Raises :class:`InfeasibleError`."""
    annotated, program = _formulate(request, graph, timings)
    with timings.phase("solve"):
        _check_room(request, program)
        free = _solve_unlimited(request, program, timings)
    return _enforce_memory_limit(request, annotated, free, timings)


def _check_room(request: PlanRequest, program: Instance) -> None:
    """Raises :class:`InfeasibleError` if it is known before solving that a step that is not rehearsed does not fit."""
    limit = float(memory_limit_of(request))
    if request.repeats != ONCE and least_bound(program.problem) > limit:
        wide = with_memory_savers(request, with_limit(program, limit))
        if least_bound(wide.problem) > limit:
            minimize_memory_within(request, wide)


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
    once, mesh, cluster = request.shared.once, request.mesh, request.cluster
    with timings.phase("annotate"):
        folded = folded_graph(request, graph)
        annotated = annotated_graph(request, folded)
        fused = kernels_of(request, graph)
        of, limits = (annotated, cluster, fused), request.rank_limits if any(request.shares) else ()
        prices = once("prices", of, mesh, limits, make=lambda: Prices.of(cluster, mesh, annotated, fused, limits))
    options = request.options
    layout = "" if options.layout is None else options.layout.restriction
    restrictions = tuple(options.pins.items()), options.zero, layout, request.roles
    settings = *restrictions, options.optimizer, request.repeats, host_limit_of(request)

    def make() -> Instance:
        return without_limit(formulate(request, annotated, prices))

    with timings.phase("price"):
        return annotated, once("program", (annotated, prices), *settings, make=make, kept=PROGRAMS)


def _is_feasible(solution: Solution) -> bool:
    return solution.status != "infeasible"


def _solver(request: PlanRequest, timings: Timings, most: float = math.inf) -> Solve:
    """Returns a function that solves an instance in at most so many seconds, as they are counted. It raises
    :class:`TooSlowError` if nothing is worth while: proven with all memory that the request allows, an estimate with
    less, where quicker placements are missing that the request has."""
    allowed = float(memory_limit_of(request))

    def solve_worth_while(instance: Instance, incumbents: Sequence[Ints]) -> Solution:
        problem = instance.problem
        # Where steps are rehearsed, what counts too much for a program with a limit may fit, and nothing is proven.
        proves = problem.memory_limit >= allowed and not (is_rehearsed(instance) and memory_binds(problem))
        worth = request.worth * (1.0 if proves else NOT_WORTH)
        options, known = request.options, _reductions(request)
        solution = solve_in_time(problem, options, timings, incumbents, worth=worth, most=most, reductions=known)
        if worth < math.inf:
            _check_worth(request, solution, worth, proves)
        return solution

    return solve_worth_while


def _reductions(request: PlanRequest) -> SharedReductions:
    """Those of all programs that the request shares with others."""
    return request.shared.once("reductions", (), make=SharedReductions)


def _check_worth(request: PlanRequest, solution: Solution, worth: float, is_proven: bool = True) -> None:
    """Raises :class:`TooSlowError` if a solution shows that nothing takes less than ``worth`` seconds, or proves it."""
    if worth <= solution.bound < math.inf:
        raise TooSlowError(f"plans on mesh {asked_mesh(request)}", solution.bound, is_proven, is_least=True)


def _solve_baselines(
    request: PlanRequest, program: Instance, timings: Timings
) -> tuple[tuple[Baseline, Solution], ...]:
    """The baselines of a program with their solutions; none under a layout: what people choose by hand is no plan of
    one that says something else. Solutions that another plan has found take as much of the time limit as they took of
    that plan's, so that a plan does not depend on those before it."""
    if request.roles:
        return ()
    options = request.options
    settings = min(BASELINE_SECONDS, options.solver_seconds), max(options.gap, BASELINE_GAP), options.solver_seed

    def make() -> tuple[tuple[Baseline, Solution], ...]:
        return tuple((line, _solve_baseline(request, line.instance)) for line in baselines(program))

    compared = request.shared.once("baselines", (program,), *settings, make=make, kept=PROGRAMS)
    timings.solving += sum(solution.seconds for _, solution in compared)
    return compared


def _solve_baseline(request: PlanRequest, instance: Instance) -> Solution:
    """Solves a baseline without a memory limit, to a coarser gap than a plan and with little work: it only serves as a
    comparison. The work is counted, so that a baseline has the same price on every machine."""
    problem = replace(instance.problem, memory_limit=math.inf)
    seconds, gap = min(BASELINE_SECONDS, request.options.solver_seconds), max(request.options.gap, BASELINE_GAP)
    return solve(problem, time_limit=seconds, gap=gap, seed=request.options.solver_seed, counted=True)


def _solve_unlimited(
    request: PlanRequest, program: Instance, timings: Timings, incumbents: Sequence[Ints] = ()
) -> Unlimited:
    """Solves without a memory limit; with recomputation and offload only if these are required."""
    plain = with_limit(program, float(memory_limit_of(request)))

    def run(instance: Instance, starts: Sequence[Ints]) -> Solution:
        make = partial(_solver(request, timings), instance, starts)
        # One of all requests that differ in bytes alone: in the limit, or in how many microbatches stages hold.
        options, known = request.options, tuple(choices.tobytes() for choices in starts)
        settings = options.gap, options.solver_seed, options.time_limit, timings.counts(options), known
        before, digest = timings.solving, cost_digest(instance.problem)
        solution = request.shared.once("unlimited", (), digest, *settings, make=make, kept=SOLUTIONS)
        timings.solving = before + solution.seconds  # As much if another plan has found it, as for the baselines.
        timings.cut_off |= solution.status == "feasible"
        _check_worth(request, solution, request.worth)
        return solution

    return solve_unlimited(request.options, plain, lambda: with_memory_savers(request, plain), run, incumbents)


def _enforce_memory_limit(
    request: PlanRequest, annotated: Graph, free: Unlimited, timings: Timings, others: Sequence[Solution] = ()
) -> MeshSolution:
    """The solution without a limit, if its rehearsed step fits into memory. Otherwise solves with limits until one
    does. ``others``: solutions of the program without recomputation and offload. Raises :class:`InfeasibleError` if
    nothing fits, :class:`ShortOfMemoryError` if only the quickest was asked for and does not."""
    peaks = Peaks(request)
    with timings.phase("solve"):
        quickest = peaks.solution(free.instance, free.solution) if _is_feasible(free.solution) else None
        if quickest is not None and peaks.fits(quickest):
            return replace(take_cheapest(peaks, quickest, others), unlimited=free.seconds)
        if request.only_quickest:
            raise short_of_memory(peaks, free, quickest, others)
        found = _found_within(request, free)
        larger = [each for limit, each in found.items() if limit >= peaks.allowed and peaks.fits(each)]
        if larger:
            timings.reuses = True
            return min(larger, key=lambda each: each.solution.objective)
    best = _found_limited(request, annotated, free, quickest, timings, peaks, others)
    found[peaks.allowed] = with_bound(request, best, free, timings)
    return found[peaks.allowed]


def _found_limited(
    request: PlanRequest,
    annotated: Graph,
    free: Unlimited,
    quickest: MeshSolution | None,
    timings: Timings,
    peaks: Peaks,
    others: Sequence[Solution],
) -> MeshSolution:
    """The best solution found that fits, where the ``quickest`` without a limit, if there is one, does not."""
    with timings.phase("solve"):
        beyond = None if quickest is None else peaks.needed(quickest)
        met, starts = MetSolutions(), [other.choices for other in others]
        mixed = best = _solve_limited(request, annotated, free, beyond, timings, peaks, starts, met)
        if best.instance.names == free.instance.names:  # Choices of untied layers are of other groups.
            best = take_cheapest(peaks, best, others)
            known = [*met.known.values(), *([] if quickest is None else [free.solution.choices])]
            mixed = best if timings.is_up(request.options) else mix_layers(request, annotated, best, known, peaks)
        # An estimate may have ruled it out.
        if quickest is not None and quickest.solution.objective < best.solution.objective and peaks.may_err(quickest):
            best = quickest if peaks.exact(quickest) <= peaks.allowed else best
    if _memory_binds(request, best, free):
        best = _refine_untied(request, annotated, best, timings, peaks)
    return min(best, mixed, key=lambda solved: solved.solution.objective)


def _found_within(request: PlanRequest, free: Unlimited) -> dict[float, MeshSolution]:
    """The solutions that other plans found for the program of a whole step, by their limits. What was found with more
    memory, and fits into less, is the best there as well. (Searches for stages ask with less memory for what differs.)
    """
    if request.repeats != ONCE:
        return {}
    options, of = request.options, (free.instance.graph, free.instance.prices, free.instance.choices)
    settings = options.recompute, allowed(options.offload), required(options.offload), options.gap, options.solver_seed
    make = dict[float, MeshSolution]
    return request.shared.once("found within", of, *settings, options.time_limit, make=make, kept=PROGRAMS)


def _solve_limited(
    request: PlanRequest,
    annotated: Graph,
    free: Unlimited,
    beyond: Needed | None,
    timings: Timings,
    peaks: Peaks,
    starts: Sequence[Ints],
    met: MetSolutions,
) -> MeshSolution:
    """The best solution found that fits. If the host's memory is short as well, and none is found, layers are untied.
    If none is found still, starts from the solution of least memory. ``beyond``: what the solution without a limit
    needs, if there is one; ``starts``: choices of the program without recomputation and offload. Raises
    :class:`InfeasibleError` if nothing fits."""

    def solver(most: float = math.inf) -> Solve:
        return met.recorded(_solver(request, timings, most))

    instance = with_memory_savers(request, free.instance)
    refining = partial(refining_seconds, instance)
    within = WithinMemory(request, peaks, solver(), lambda seconds: solver(refining(seconds)), free)
    least = least_if_far(request, instance, beyond)
    if beyond is not None and not free.instance.is_wide:
        starts = [free.solution.choices, *starts]
    try:
        best, beyond = within.best(instance, beyond, starts)
    except TooSlowError as error:
        # What counts too much for the program's limit may fit.
        best = None if error.is_proven else met.quicker(instance, request.worth, peaks)
        if best is None:
            raise
    if best is None and host_binds(instance.problem):
        instance = untie_layers(request, annotated, instance)
        met.known.clear()  # Choices of groups that are no more.
        best, beyond = within.best(instance, None, ())
    if best is None:
        least = minimize_memory_within(request, instance, least)
        best = within.quickest_that_fits(least, beyond) or least
    return met.quickest(best, peaks)


def _memory_binds(request: PlanRequest, best: MeshSolution, free: Unlimited) -> bool:
    """Whether the memory limit costs more than the gap, so that layers that may differ are worth trying.

    A heuristic: the cost of the limit comes from the program whose equal layers choose alike by construction. Layers
    that differ, mostly at the ends of the model, could be faster even without a limit."""
    instance, solution = best.instance, best.solution
    # What is cut into stages is solved several times, and layers that differ made it hardly quicker (a per cent).
    folded = len(instance.names) < len(instance.graph.nodes) <= UNTIED_NODES and request.repeats.stages == 1
    limit_costs = free.costs_of_limit(solution) > request.options.gap
    # A limit that is far away is not what costs. Chosen, not measured.
    return folded and limit_costs and peak_bytes(best) > 0.8 * memory_limit_of(request)


def _refine_untied(
    request: PlanRequest, annotated: Graph, best: MeshSolution, timings: Timings, peaks: Peaks
) -> MeshSolution:
    """Solves again with layers tied only within stretches of depth. Used where memory is short."""
    with timings.phase("price"):
        limit = next_limit(peaks.allowed, None, peaks.needed(best))
        untied = untie_layers(request, annotated, best.instance)
        instance = with_limit(untied, limit, best.solution.memory_price)
    with timings.phase("solve"):
        incumbent = instance.chosen(best.assignment)
        most = refining_seconds(instance, best.solution.seconds)
        known = _reductions(request)
        solution = solve_in_time(instance.problem, request.options, timings, [incumbent], most=most, reductions=known)
    if not _is_feasible(solution) or solution.objective >= best.solution.objective:
        return best
    refined = MeshSolution.of(instance, solution)
    return refined if peaks.exact(refined) <= peaks.allowed else best


def _price_baseline(request: PlanRequest, line: Baseline, solution: Solution) -> Predicted | None:
    """Predicts a baseline. Near the memory limit, its memory is that of its program where that is soon known, so that
    it is said to fit only if a plan with its placements would."""
    if not _is_feasible(solution):
        return None
    bill = folded_bill(line.instance, solution.choices) or MeshSolution.of(line.instance, solution).breakdown
    counted, limit = bill.memory.peak, memory_limit_of(request)
    in_doubt = limit < IN_DOUBT * counted + BUCKET_BYTES and counted <= COUNTED_AT_MOST * limit
    is_exact = in_doubt and len(line.instance.graph) < LEAST_NODES
    exact = Peaks(request).solution(line.instance, solution).step.memory.memory if is_exact else None
    return predicted(bill, line.instance, request.cluster, exact)
