"""Solves the pipelines that are worth trying for a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from autopar.cost import usable_host_bytes
from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.graph import Graph
from autopar.ir.plan_record import Predicted
from autopar.options import SOLVED, Options
from autopar.passes.annotate.few_layers import FewLayers
from autopar.passes.pipeline.coupled_samples import CoupledError
from autopar.passes.pipeline.microbatch import microbatch, split_inputs
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.planner.memory_advice import FULLER
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.request import PlanRequest, asked_mesh, folded_graph, rank_limits, stage_limits
from autopar.planner.step_graphs import graph_alone, pipelined_step_of
from autopar.planner.timings import Timings
from autopar.plans.views.quantities import microbatches_text
from autopar.restriction import Restriction
from autopar.search.restricted.never_fits import never_fits

from .attempts import attempts, beside
from .candidate import Candidate, Excluded, Failure, Staged, named_axes
from .custom_schedule import ScheduleSearch, with_solved_schedule
from .division_bounds import Division, covered
from .infeasible import pipeline_infeasible
from .pipeline import search
from .pipeline_predicted import staged_predicted
from .pipeline_request import MOST_CHUNKS, PipelineRequest
from .pipeline_solution import PipelineSolution
from .rounds import inner_repeats
from .stage_meshes import StageLayout
from .stage_problems import SAFETY_FACTOR, StagePrograms
from .to_plan import staged_plan

# If a pipeline is this many times slower than the best plan without stages, more microbatches are not tried.
# Chosen: more microbatches shrink only the bubble and what is in flight; not measured.
MORE_MICROBATCHES_WITHIN = 1.5
# The share of counted work that is left for microbatches and pipelines where memory is short. Chosen: programs under a
# limit that binds take long, and those without stages may have taken most of it.
FOR_SHORT_OF_MEMORY = 0.75
# The share that is left for each number of stages once another was tried, or the whole step in microbatches: each takes
# all it may if it hardly fits. Chosen: enough for the programs of two layouts.
FOR_STAGES = 0.25
# The operations of a step from which on a program of few layers says first whether a pipeline could win. Chosen: of
# Llama of 32 layers, with 6,200, that spares half of the search; of smaller ones a price of all layers takes no longer.
MANY_OPERATIONS = 5000
_NO_LOSS = (
    "a step in stages or microbatches runs forward and backward in turns, so the loss must be part of it, but the "
    "model returns none for this batch: pass the labels from which the model computes it, or loss_fn, called as "
    "loss_fn(output) or loss_fn(output, batch)"
)


def with_stages(
    request: PlanRequest,
    pinned: Mapping[str, str],
    timings: Timings,
    best: float,
    lacks_memory: bool = False,
    before: Staged | None = None,
    is_ahead: bool = False,
) -> Staged:
    """Solves every pipeline (and gradient accumulation) worth trying.

    Args:
        pinned: the stages of modules, by path.
        best: seconds of the best plan without stages, infinite if there is none.
        lacks_memory: whether that would be quicker with more memory.
        before: what a search with fewer seconds for a step found. Its candidates are among those that are returned.
        is_ahead: whether this is such a search, of stages alone.
    """
    if request.loss is None and request.graph.gradients:
        return Staged(failure=_impossible(OptionsError(_NO_LOSS)))
    graph, found = pipelined_step_of(request), before or Staged()
    lacks_memory = (lacks_memory or math.isinf(best)) and not pinned
    if lacks_memory and request.options.stages in (None, 1):
        timings.reserve(request.options, FOR_SHORT_OF_MEMORY)
    begun = set[int]()

    def least() -> float:
        return found.least

    for layout, counts in attempts(request, graph, best, lacks_memory, not is_ahead, least):
        quickest = min(best, found.least)
        remaining = [n for n in counts if found.settled.get((layout, n), 0.0) < quickest]
        if not remaining:
            continue
        if lacks_memory and begun and layout.stages not in begun:
            timings.reserve(request.options, FOR_STAGES)  # For each number of stages: others may have taken all.
        # What failed ahead shows nothing of the whole step in microbatches, which is tried now.
        if _is_over(request, timings, quickest, has_failed=bool(begun) and found.failure is not None):
            break
        begun.add(layout.stages)
        found += _of_layout(partial(_Pipeline, request, pinned, graph, layout), remaining, timings, best, quickest)
    if not is_ahead:
        found = _with_beside(request, pinned, found, timings, best)
        found = replace(
            found.without_quicker_losers(min(best, found.least)), failure=found.failure or _nothing(request)
        )
    return found


def _with_beside(
    request: PlanRequest, pinned: Mapping[str, str], found: Staged, timings: Timings, best: float
) -> Staged:
    """What was ``found``, and the same with fewer and more microbatches than the quickest, as long as these pay."""
    graph = pipelined_step_of(request)
    while True:
        own = min(found.candidates, key=lambda each: each.seconds, default=None)
        if own is None or own.layout is None:
            return found
        layout, least = own.layout, min(best, found.least)
        counts = beside(request, graph, layout, own.microbatches, own.seconds, least)
        left = [n for n in counts if found.settled.get((layout, n), 0.0) < least]
        if not left or timings.is_spent(request.options):
            return found
        found += _of_layout(partial(_Pipeline, request, pinned, graph, layout), left[:1], timings, least, least)


def _nothing(request: PlanRequest) -> Failure:
    """Why there is none, if none was tried."""
    mesh = asked_mesh(request)
    text = f"no pipeline stages are possible on the mesh {mesh} under these options: leave some of them out"
    return _impossible(OptionsError(text))


def _is_over(request: PlanRequest, timings: Timings, quickest: float, has_failed: bool) -> bool:
    """Whether no more layouts are tried: time is up, and there is a plan, or at least a reason why there is none;
    or nothing can fit, as the first failure explains."""
    if has_failed and (timings.is_up(request.options) or never_fits(request)):
        return True
    return timings.is_spent(request.options) and math.isfinite(quickest)


def _impossible(error: OptionsError) -> Failure:
    return Failure(error, lambda: error)


def _of_layout(
    pipeline: Callable[[int], _Pipeline], counts: Sequence[int], timings: Timings, best: float, quickest: float
) -> Staged:
    """Solves the pipelines of one layout, with more and more microbatches as long as they pay. Losing is the first that
    is expected to be too slow. ``quickest``: seconds of the best plan found so far; ``best``: of the best plan without
    stages."""
    found, remaining = Staged(), list(counts)
    if never_fits(pipeline(remaining[0]).request):  # The first failure is explained, and ends the search.
        remaining = _holding_less(remaining, pipeline(remaining[0]).layout.stages)
    while remaining:
        attempt = pipeline(remaining.pop(0))
        last = found.candidates[-1].seconds if found.candidates else math.inf
        tried = _attempted(attempt, timings, min(quickest, found.least))
        found += tried
        # With more microbatches, ranks idle less and launch more kernels. Once that does not pay, even more of them
        # will not pay either.
        if tried.candidates and tried.least > min(last, MORE_MICROBATCHES_WITHIN * best):
            break
        error = tried.failure.error if tried.failure else None
        if isinstance(error, OptionsError):
            # If the batch cannot be divided, as in batch norm, the whole batch is still possible.
            is_left = math.isinf(best) and (attempt.layout, 1) not in found.settled
            remaining = [1] if is_left else []
        elif isinstance(error, InfeasibleError):
            if not isinstance(error, TooSlowError):
                remaining = _holding_less(remaining, attempt.layout.stages)
            if _is_over(attempt.request, timings, quickest, has_failed=True):
                break
    return found


def _holding_less(counts: Sequence[int], stages: int) -> list[int]:
    """Those of ascending numbers of microbatches with which stages hold much less than the whole batch: in the first
    one, as many are in flight as there are stages."""
    return [n for n in counts if n >= stages] or list(counts[-1:])


def _attempted(attempt: _Pipeline, timings: Timings, seconds: float) -> Staged:
    """What is known of a pipeline once it is solved, or is known to take more than ``seconds`` or to be impossible."""
    own = (attempt.layout, attempt.microbatches)
    if (slow := attempt.too_slow(timings, seconds)) is not None:
        return Staged(excluded=(slow,), settled={own: seconds})
    try:
        return Staged((attempt.solved(timings, seconds),), settled={own: math.inf})
    except InfeasibleError as error:
        return _impossible_within(attempt, error, seconds, timings)
    except OptionsError as error:
        _raise_if_asked(attempt, error)
        return Staged(failure=_impossible(error), settled={own: math.inf})


def _impossible_within(attempt: _Pipeline, error: InfeasibleError, seconds: float, timings: Timings) -> Staged:
    """What is known of a pipeline of which ``error`` says that none fits, or none that takes less than ``seconds``."""
    own, failure = (attempt.layout, attempt.microbatches), Failure(error, partial(attempt.too_full, error, timings))
    if not isinstance(error, TooSlowError):
        return Staged(failure=failure, settled={own: math.inf})
    slow = Excluded(attempt.name, TooSlowError(attempt.name, error.seconds, is_proven=False, is_least=error.is_least))
    losing = {attempt.layout: slow} if math.isfinite(seconds) else {}
    return Staged(losing=losing, failure=failure, settled={own: seconds})


def _raise_if_asked(attempt: _Pipeline, error: OptionsError) -> None:
    """Raises ``error``, of a number of microbatches that is impossible, if a user asked for that number."""
    options, own = attempt.request.options, Restriction.of(attempt.request.options.layout)
    if options.microbatches is not None:
        if isinstance(error, CoupledError) and own.microbatch is not None:
            raise error.under_layout(own.microbatch) from error
        raise error


def _limits(request: PlanRequest, layout: StageLayout) -> tuple[float, ...]:
    """Bytes for each device, by pipeline rank."""
    return tuple(map(float, stage_limits(request, layout.blocks)))


@dataclass(frozen=True)
class _Pipeline:
    """A pipeline to solve: the step ``graph`` in ``microbatches`` over the stages of ``layout``. ``pinned``: the stages
    of modules, by path."""

    request: PlanRequest
    pinned: Mapping[str, str]
    graph: Graph
    layout: StageLayout
    microbatches: int

    def solved(self, timings: Timings, best: float = math.inf) -> Candidate:
        """The quickest such pipeline. ``best``: seconds of the best plan found so far. Raises :class:`InfeasibleError`
        if none fits, :class:`OptionsError` if none is possible."""
        request, layout, inside = self.request, self.layout, self._inside
        if layout.stages == 1:  # The objective is the step.
            inside = replace(inside, worth=min(request.worth, best))
        programs = StagePrograms(inside, layout, best, timings)
        pipeline_request = PipelineRequest(
            graph=self.graph,
            inputs=split_inputs(request.graph),
            layout=layout,
            microbatches=self.microbatches,
            schedule=request.options.schedule,
            chunks=Restriction.of(request.options.layout).interleave,
            pins=dict(self.pinned),
            limits=_limits(request, layout),
            solve=programs.solve,
            too_large=programs.too_large,
            cluster=request.cluster,
            host_limit=usable_host_bytes(request.cluster),
            alone=self._alone(),
            best=best,
            shared=request.shared,
        )
        solution = search(pipeline_request)
        prices = solution.uncut.prices
        chosen = replace(inside, mesh=prices.mesh, shares=prices.shares)
        solved = _Solved(request, chosen, timings, solution)
        return replace(solved.candidate(), improved=solved.improved)

    @property
    def _inside(self) -> PlanRequest:
        """The request for the mesh inside a stage."""
        request, axes = self.request, self.layout.axes
        names = tuple(request.axis_names[axis] for axis in axes) if request.axis_names else ()
        roles = tuple(request.roles[axis] for axis in axes) if request.roles else ()
        limits = rank_limits(request)
        return replace(request, mesh=self.layout.mesh, axis_names=names, roles=roles, rank_limits=limits)

    def too_slow(self, timings: Timings, best: float) -> Excluded | None:
        """Why the pipeline is not searched for, if few layers show that it takes longer than ``best`` seconds. That is
        asked of deep models alone, where the options leave stages open."""
        if math.isinf(best) or len(self.graph) < MANY_OPERATIONS or self._is_asked or self.layout.stages == 1:
            return None
        few, stacks = FewLayers().shortened(folded_graph(self.request, self.graph))
        if not stacks:
            return None
        programs = StagePrograms(self._inside, self.layout, best, timings)
        with suppress(InfeasibleError, OptionsError):
            pieces = microbatch(few, self.microbatches, split_inputs(self.request.graph), self._alone())
            repeats = inner_repeats(self.microbatches, self.layout.stages)
            seconds = programs.quick_price(SaveActivations()(pieces.graph), self.graph, stacks, repeats)
            if seconds > SAFETY_FACTOR * best:
                return Excluded(self.name, TooSlowError(self.name, seconds, is_proven=False, is_least=True))
        return None

    @property
    def name(self) -> str:
        """By sizes: the names of axes count what all layers do on them, which is known once they are placed."""
        return f"{self.layout.described} x {self.layout.mesh}, {microbatches_text(self.microbatches)}"

    @property
    def _is_asked(self) -> bool:
        """Whether the options say something about stages, or devices differ, so that few layers show nothing."""
        options = self.request.options
        asked = (options.stages, options.schedule, options.microbatches, options.layout)
        return bool(self.pinned or self.request.cluster.groups) or any(value is not None for value in asked)

    def _alone(self) -> Callable[[], Graph] | None:
        """The step graph of a batch of the size of a microbatch, if microbatches may be batches of their own."""
        request = self.request
        if request.options.batch_statistics == "batch":
            return None
        return partial(graph_alone, request.graph, request.loss, request.batch, self.microbatches)

    def too_full(self, error: InfeasibleError, spent: Timings) -> InfeasibleError:
        """The error for a pipeline that does not fit: it names a sufficient limit. ``error`` itself if none was found.
        Each search for a limit has its own time, and its work is counted, so that a busy machine names the same limit.
        ``spent``: the time that planning took."""
        request, budget = (
            self.request,
            spent.advising(self.request.options, len(self.graph), math.prod(self.request.mesh)),
        )

        def peak(options: Options, limit: int) -> int | None:
            limited = replace(request, options=options, memory_limit=limit)
            with suppress(InfeasibleError, OptionsError):
                return replace(self, request=limited).solved(Timings(counted=True)).figures()[1].peak_bytes
            return None

        start = None if error.needed_bytes is None else math.ceil(FULLER * error.needed_bytes)
        found = pipeline_infeasible(request, self.layout, self.microbatches, start, peak, budget)
        return found or InfeasibleError(f"{error.explained}{budget.remark}").needing(error.needed_bytes)


@dataclass(frozen=True)
class _Solved:
    """A solved pipeline of ``request``; ``inside`` is the request for the mesh of one stage."""

    request: PlanRequest
    inside: PlanRequest
    timings: Timings
    solution: PipelineSolution

    def candidate(self, warning: str = "") -> Candidate:
        make = partial(staged_plan, self.request, self.inside, self.solution, self.timings, warning)
        seconds = staged_predicted(self.solution).step_seconds
        layout, count = self.solution.layout, self.solution.pipeline.schedule.microbatches
        return Candidate(seconds, layout, make, self.figures, microbatches=count, divisions=self._covered())

    def _covered(self) -> frozenset[Division]:
        """The divisions of which this is the quickest: of all numbers of chunks that were tried."""
        restriction = Restriction.of(self.request.options.layout)
        tried = (restriction.interleave,) if restriction.interleave else range(1, MOST_CHUNKS + 1)
        stages, count = self.solution.layout.stages, self.solution.pipeline.schedule.microbatches
        return covered(self.inside, stages, count, tried if stages > 1 else (1,))

    def figures(self) -> tuple[str, Predicted]:
        solution = self.solution
        where = named_axes(self.inside, solution.uncut.assignment, solution.uncut.instance.graph)
        schedule = solution.pipeline.schedule
        count = microbatches_text(schedule.microbatches)
        if solution.layout.stages == 1:
            return f"{where}, {count}", staged_predicted(solution)
        stages = solution.layout.described
        stages += f" x {where}" if math.prod(self.inside.mesh) > 1 and not solution.layout.counts else ""
        return f"{stages}, {schedule.name}, {count}", staged_predicted(solution)

    def improved(self) -> Candidate:
        """The pipeline under a solved schedule if the options request one, or if they request none and it pays."""
        options = self.request.options
        if options.schedule not in (None, SOLVED):
            return self.candidate()
        limits = _limits(self.request, self.solution.layout)
        search = ScheduleSearch(options.schedule == SOLVED, limits, options.solver_seconds, options.solver_seed)
        better, warning = with_solved_schedule(self.solution, search)
        return replace(self, solution=better).candidate(warning)
