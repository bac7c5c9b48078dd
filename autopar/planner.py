"""From a traced model to a plan without stages: annotate, price, solve, and read the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from autopar.cost import usable_bytes, usable_host_bytes
from autopar.passes.annotate import annotate
from autopar.passes.fold import fold_layers
from autopar.passes.recompute import recomputed

from .account import Account, account
from .alternatives import holdings
from .assignment import Assignment, ParameterPlacement
from .cluster import Cluster
from .exact_memory import exact_memory
from .figures import predicted
from .graph import Graph, Node
from .infeasible import infeasible
from .instance import Choice, Instance, build_instance
from .options import Options
from .placed_step import PlacedStep
from .plan import Predicted
from .prices import Prices
from .problem import Ints, Problem, Solution, evaluate, host_binds, memory_of
from .repeats import ONCE, Repeats
from .restrict import baselines, pin_instance, pinned_apart, with_choices, zero_allows
from .solve import smallest_choices, solve
from .within_memory import ROUNDS, Solve, fits, may_widen, solve_wide, solve_within, tightened, widened

STRETCHES = 3
BASELINE_GAP = 0.05
# Counted seconds for the plan of least memory.
SMALLEST_SECONDS = 3.0


@dataclass(frozen=True)
class Question:
    """What a plan is asked for: the normalised ``graph`` (symbolic in the batch), its ``loss`` output, the ``batch``
    size, the hardware and the options. ``model`` describes it for people. ``repeats``, ``memory_limit`` and
    ``host_limit`` are those of one placement program of a search over stages; ``notes`` become warnings of the plan."""

    graph: Graph
    loss: str | None
    batch: int
    mesh: tuple[int, ...]
    cluster: Cluster
    options: Options
    model: str = "model"
    axis_names: tuple[str, ...] = ()
    repeats: Repeats = ONCE
    memory_limit: float | None = None
    host_limit: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """One solved mesh: the instance, the solution, and its bill."""

    instance: Instance
    solution: Solution
    assignment: Assignment
    account: Account

    @property
    def prices(self) -> Prices:
        return self.instance.prices


@dataclass
class Timings:
    """CPU seconds by phase, and those that solvers took of ``Options.time_limit``."""

    seconds: dict[str, float] = field(default_factory=dict)
    solving: float = 0.0

    def left(self, time_limit: float) -> float:
        return max(time_limit - self.solving, 0.0)

    def is_spent(self, time_limit: float) -> bool:
        """Whether too little is left to solve anything; each program leaves half of what it finds."""
        return self.left(time_limit) <= 0.02 * time_limit

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


def axes_are_fixed(question: Question) -> bool:
    """Whether the axes of the mesh are spoken of, so that they cannot be regrouped."""
    return not question.options.mesh_search or bool(question.options.pins) or bool(question.axis_names)


def mesh_candidates(question: Question) -> list[tuple[int, ...]]:
    """The mesh as given; if it has one axis and may be regrouped, its devices split into two axes every way. Placements
    that coincide on both axes make them one, so that the single axis is among them."""
    given = question.mesh
    devices = math.prod(given)
    splits: list[tuple[int, ...]] = [(k, devices // k) for k in range(2, devices) if devices % k == 0]
    return [given] if axes_are_fixed(question) or len(given) > 1 or not splits else splits


def memory_limit_of(question: Question) -> int:
    """Bytes a device may use: as asked, or what the cluster's device leaves after its reserve."""
    return int(question.memory_limit or question.options.memory_limit or usable_bytes(question.cluster))


def host_limit_of(question: Question) -> float:
    """Bytes of host memory for each device that a plan may use."""
    return question.host_limit if question.host_limit is not None else usable_host_bytes(question.cluster)


def _posed(question: Question, graph: Graph, timings: Timings) -> tuple[Graph, Instance]:
    """The annotated graph, and the placement program of it with its layers folded."""
    with timings.phase("annotate"):
        annotated = annotate(graph, question.mesh)
        prices = Prices.of(question.cluster, question.mesh, annotated)
    with timings.phase("price"):
        apart = pinned_apart(annotated, question.options.pins)
        instance = _instance(question, fold_layers(annotated, 1, apart), prices)
    return annotated, instance


def solve_mesh(question: Question, graph: Graph, timings: Timings) -> tuple[Answer, dict[str, Predicted | None]]:
    """The best answer on just this mesh, and the baselines priced on it. Raises :class:`InfeasibleError`."""
    annotated, plain = _posed(question, graph, timings)
    with timings.phase("solve"):
        others = {line.name: _solve_baseline(question, line.instance, timings) for line in baselines(plain)}
        instance, solution = _solved(question, plain, timings, [s.choices for s in others.values() if _is_one(s)])
        if solution.status != "infeasible":
            solution = _best(instance, solution, [s for s in others.values() if _is_one(s) and fits(instance, s)])
    best = _settled(question, annotated, instance, solution, timings)
    with timings.phase("report"):
        priced = {name: _priced(plain, other, question) for name, other in others.items()}
    return best, priced


def solve_only(question: Question, graph: Graph, timings: Timings) -> Answer:
    """The best answer on just this mesh, without baselines. Raises :class:`InfeasibleError`."""
    annotated, plain = _posed(question, graph, timings)
    with timings.phase("solve"):
        instance, solution = _solved(question, plain, timings)
    return _settled(question, annotated, instance, solution, timings)


def _is_one(solution: Solution) -> bool:
    return solution.status != "infeasible"


def _solved(
    question: Question, plain: Instance, timings: Timings, incumbents: Sequence[Ints] = ()
) -> tuple[Instance, Solution]:
    """The instance that had to be solved, without or with recomputation, and its solution."""
    return solve_within(
        question.options, plain, lambda: _widest(question, plain), _solver(question, timings), incumbents
    )


SolveAgain = Callable[[Instance, Solution], tuple[Instance, Solution]]


def _settled(question: Question, annotated: Graph, instance: Instance, solution: Solution, timings: Timings) -> Answer:
    """The answer that a solution means, solved again with less memory as long as its bill does not fit; with layers
    that may differ if the host's memory is short as well. If nothing so found fits, the plan of least memory may.
    Raises :class:`InfeasibleError`."""
    limit, again = float(memory_limit_of(question)), _with_less(question, timings)
    with timings.phase("solve"):
        found = _fitting(instance, solution, limit, again)
        wide = instance if found is not None else _widest(question, instance)
    if found is None and host_binds(wide.problem):
        wide = _stretched(question, annotated, wide, timings)
        with timings.phase("solve"):
            found = _fitting(wide, solve_wide(wide, _solver(question, timings), ()), limit, again)
    if found is not None:
        return _refined(question, annotated, found, timings)
    with timings.phase("solve"):
        least = _smallest(wide)
    if least is None:
        raise infeasible(wide, limit)
    peak = _peak(least)
    if peak <= limit:
        return least
    raise infeasible(wide, limit, peak)


def _stretched(question: Question, annotated: Graph, folded: Instance, timings: Timings) -> Instance:
    """The instance whose equal layers are tied only within stretches of depth, as wide as ``folded``."""
    with timings.phase("price"):
        apart = pinned_apart(annotated, question.options.pins)
        instance = _instance(question, fold_layers(annotated, STRETCHES, apart), folded.prices)
        instance = replace(instance, unlimited=folded.unlimited)
        return _widest(question, instance) if folded.is_wide else instance


def _widest(question: Question, instance: Instance) -> Instance:
    """The instance with recomputation and offload, if the options leave them and they are not yet in it."""
    if not may_widen(question.options, instance):
        return instance
    return _restricted(question, widened(instance, question.options))


def _with_less(question: Question, timings: Timings) -> SolveAgain:
    """Solves an instance whose limit was lowered, from the solution before: with recomputation and offload, if these
    had not been needed so far."""

    run = _solver(question, timings)

    def again(less: Instance, before: Solution) -> tuple[Instance, Solution]:
        wide = _widest(question, less)
        return wide, run(less, ()) if wide is less else solve_wide(wide, run, [before.choices])

    return again


def _fitting(instance: Instance, solution: Solution, limit: float, again: SolveAgain) -> Answer | None:
    """An answer whose step needs at most ``limit`` bytes: what ``solution`` means, or what solving ``again`` with less
    and less memory finds."""
    for _ in range(ROUNDS):
        if not _is_one(solution):
            return None
        found = _read(instance, solution)
        less = tightened(instance, solution.choices, _peak(found), limit)
        if less is None:
            return found
        instance, solution = again(less, solution)
    return None


def _smallest(instance: Instance) -> Answer | None:
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
        _read(instance, Solution(c, evaluate(problem, c), 0.0, "feasible", 0.0)) for c in (cheapest.choices, choices)
    ]
    return min(found, key=_peak)


def _peak(found: Answer) -> int:
    """Peak bytes of the step, rehearsed where that can be; else those of its bill."""
    instance = found.instance
    step = placed_step(instance, found.assignment)
    memory = exact_memory(step.graph, step.assignment, instance, tuple(holdings(step))).memory
    return (memory or found.account.memory).peak


def fixed_assignment(question: Question, graph: Graph, parameters: Mapping[str, ParameterPlacement]) -> Assignment:
    """The best assignment of an annotated graph whose parameters rest where ``parameters`` says (those it does not
    name: anywhere)."""
    prices = Prices.of(question.cluster, question.mesh, graph)
    instance = build_instance(fold_layers(graph), prices, optimizer=question.options.optimizer, memory_limit=math.inf)

    def allowed(node: Node, choice: Choice) -> bool:
        if not isinstance(choice, ParameterPlacement) or node.target not in parameters:
            return True
        return choice.weight == parameters[node.target].weight

    solution = _solve(question, with_choices(instance, allowed), Timings())
    chosen = instance.assignment(solution.choices)
    places = {
        node.name: parameters.get(node.target, chosen.parameters[node.name]) for node in graph.placeholders("param")
    }
    return replace(chosen, parameters=places)


def _instance(question: Question, graph: Graph, prices: Prices) -> Instance:
    instance = build_instance(
        graph,
        prices,
        optimizer=question.options.optimizer,
        memory_limit=float(memory_limit_of(question)),
        host_limit=host_limit_of(question),
        repeats=question.repeats,
    )
    return _restricted(question, instance)


def _restricted(question: Question, instance: Instance) -> Instance:
    """With only the choices that the options leave."""
    stage = question.options.zero
    if stage is not None:
        instance = with_choices(instance, zero_allows(instance, stage), gathers=stage == 3)
    return pin_instance(instance, question.options.pins)


def _solve(question: Question, instance: Instance, timings: Timings, incumbents: Sequence[Ints] = ()) -> Solution:
    return _solve_in_time(question, instance.problem, timings, question.options.gap, incumbents)


def _solver(question: Question, timings: Timings) -> Solve:
    return lambda instance, known: _solve(question, instance, timings, known)


def _solve_baseline(question: Question, instance: Instance, timings: Timings) -> Solution:
    """A baseline is a comparison, not the answer: priced without a memory limit, and to a coarser gap than a plan."""
    problem = replace(instance.problem, memory_limit=math.inf)
    return _solve_in_time(question, problem, timings, max(question.options.gap, BASELINE_GAP))


def _solve_in_time(
    question: Question, problem: Problem, timings: Timings, gap: float, incumbents: Sequence[Ints] = ()
) -> Solution:
    """Solves in at most half of the time that is left, so that a hard program leaves some to those after it. One that
    needs less is solved as it would be with any other limit."""
    options = question.options
    seconds = timings.left(options.time_limit) / 2
    solution = solve(problem, time_limit=seconds, gap=gap, seed=options.seed or 0, incumbents=incumbents)
    timings.solving += solution.seconds
    return solution


def _best(instance: Instance, solution: Solution, others: list[Solution]) -> Solution:
    """The cheapest: a baseline that beats what the solver found in its time is the answer, with the solver's bound."""
    cheapest = min([solution, *others], key=lambda s: s.objective)
    if cheapest is solution:
        return solution
    return replace(cheapest, bound=solution.bound, status="feasible", seconds=solution.seconds)


def _memory_binds(question: Question, best: Answer) -> bool:
    """Whether the memory limit costs more than the gap, so that layers that may differ are worth trying.

    A heuristic: what the limit costs is told from the program in which equal layers choose alike by construction.
    Layers that differ, at the ends of the model above all, could be quicker even without a limit."""
    instance, solution = best.instance, best.solution
    folded = len(instance.names) < len(instance.graph.nodes)
    dearer = solution.objective - instance.unlimited > question.options.gap * solution.objective
    return folded and dearer and memory_of(instance.problem, solution.choices) > 0.8 * instance.problem.memory_limit


def _refined(question: Question, annotated: Graph, best: Answer, timings: Timings) -> Answer:
    """Where memory is short equal layers may differ: solves again with layers tied only within stretches of depth."""
    if not _memory_binds(question, best):
        return best
    instance = _stretched(question, annotated, best.instance, timings)
    with timings.phase("solve"):
        solution = _solve(question, instance, timings, [instance.chosen(best.assignment)])
    if not _is_one(solution) or solution.objective >= best.solution.objective:
        return best
    found = _read(instance, solution)
    return found if _peak(found) <= memory_limit_of(question) else best


def _read(instance: Instance, solution: Solution) -> Answer:
    assignment = instance.assignment(solution.choices)
    return Answer(instance, solution, assignment, account(placed_step(instance, assignment)))


def placed_step(instance: Instance, assignment: Assignment) -> PlacedStep:
    """The step of ``instance`` that is placed by ``assignment``, with what that recomputes."""
    placed = recomputed(instance.graph, assignment)
    return PlacedStep(*placed, instance.prices, instance.optimizer, instance.repeats)


def _priced(instance: Instance, solution: Solution, question: Question) -> Predicted | None:
    if solution.status == "infeasible":
        return None
    found = _read(instance, solution)
    return predicted(found.account, instance, question.cluster)
