"""The pipelines worth trying for a request, each solved."""

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
from autopar.passes.pipeline.microbatch import split_inputs
from autopar.planner.request import PlanRequest, memory_limit_of
from autopar.planner.step_graphs import pipelined_graph
from autopar.planner.timings import Timings

from .attempts import attempts
from .candidate import Candidate, named_axes
from .custom_schedule import Measure, with_solved_schedule
from .infeasible import pipeline_infeasible
from .pipeline import PipelineRequest, PipelineSolution
from .pipeline_predicted import staged_predicted
from .rehearsed_memory import search_within
from .stage_meshes import StageLayout
from .stage_problems import StagePrograms
from .to_plan import staged_plan

# A pipeline this many times slower than the best plan without is not helped by more microbatches.
# Chosen: more microbatches shrink only the bubble and what is in flight; not measured.
HOPELESS = 1.5
_NO_LOSS = (
    "a step in stages or microbatches runs forward and backward in turns, so the loss must be part of it, but the "
    "model returns none for this batch: pass the labels that the model makes it of, or loss_fn, called as "
    "loss_fn(output) or loss_fn(output, batch)"
)

# Makes the error for a pipeline that cannot be had. Its advice is searched for, so only the one that is raised is made.
Complaint = Callable[[], Exception]


def with_stages(
    request: PlanRequest, pinned: Mapping[str, str], timings: Timings, best: float
) -> tuple[list[Candidate], Complaint]:
    """Every pipeline (and gradient accumulation) worth trying, and the last reason why one could not be had: an error
    only if nothing else was found, or if just this was asked for.

    Args:
        pinned: the stages of modules, by path.
        best: seconds of the best plan without stages, infinite if there is none.
    """
    if request.loss is None and request.graph.gradients:
        return [], lambda: OptionsError(_NO_LOSS)
    whole = pipelined_graph(request.graph, request.loss, request.batch)
    found: list[Candidate] = []
    complaint: Complaint = partial(AssertionError, "nothing was tried")
    for layout, counts in attempts(request, whole, best):
        quickest = min([best, *(one.seconds for one in found)])
        if timings.is_spent(request.options.time_limit) and math.isfinite(quickest):
            break
        made, refused = _of_layout(partial(_Pipeline, request, pinned, whole, layout), counts, timings, best, quickest)
        found += made
        complaint = refused or complaint
    return found, complaint


def _of_layout(
    pipeline: Callable[[int], _Pipeline], counts: Sequence[int], timings: Timings, best: float, quickest: float
) -> tuple[list[Candidate], Complaint | None]:
    """The pipelines of one layout, for each number of microbatches as long as more of them pay, and the last reason why
    one could not be had. ``quickest``: seconds of the best plan known, ``best`` of that without stages."""
    found, left = list[Candidate](), list(counts)
    complaint: Complaint | None = None
    while left:
        candidate = pipeline(left.pop(0))
        try:
            made = candidate.solved(timings, min([quickest, *(one.seconds for one in found)]))
        except InfeasibleError as error:
            complaint = partial(candidate.too_full, error)
            continue
        except OptionsError as error:
            if candidate.request.options.microbatches is not None:
                raise
            complaint = partial(_itself, error)
            # Where samples do not come apart, as in batch norm, there is the whole batch.
            left = [1] if candidate.microbatches > 1 and math.isinf(best) else []
            continue
        last = found[-1].seconds if found else math.inf
        found.append(made)
        # More microbatches idle less and launch more: once that does not pay, it will not again.
        if made.seconds > min(last, HOPELESS * best):
            break
    return found, complaint


def _itself(error: Exception) -> Exception:
    return error


@dataclass(frozen=True)
class _Pipeline:
    """A pipeline to be solved: the step ``whole`` in so many ``microbatches`` over the stages of ``layout``."""

    request: PlanRequest
    pinned: Mapping[str, str]
    whole: Graph
    layout: StageLayout
    microbatches: int

    def solved(self, timings: Timings, best: float = math.inf) -> Candidate:
        """The quickest; ``best``: seconds of the best plan known. Raises :class:`InfeasibleError` if none fits,
        :class:`OptionsError` if none can be had."""
        request, layout = self.request, self.layout
        names = tuple(request.axis_names[axis] for axis in layout.axes) if request.axis_names else ()
        inside = replace(request, mesh=layout.mesh, axis_names=names)
        pipeline_request = PipelineRequest(
            graph=self.whole,
            inputs=split_inputs(request.graph),
            layout=layout,
            microbatches=self.microbatches,
            schedule=request.options.schedule,
            pins=dict(self.pinned),
            memory_limit=float(memory_limit_of(request)),
            solve=StagePrograms(inside, best, timings).solve,
            host_limit=usable_host_bytes(request.cluster),
        )
        made = search_within(pipeline_request)
        solved = _Solved(request, replace(inside, mesh=made.whole.prices.mesh), timings, made)
        return replace(solved.candidate(), improved=solved.improved)

    def too_full(self, error: InfeasibleError) -> InfeasibleError:
        """The error for a pipeline that fits into no device; ``error`` itself, if no memory was found that helps. What
        the refused search took of its time is not taken off the search for a limit, whose work is counted, so that a
        busy machine names the same one."""
        timings = Timings(counted=True)

        def held(options: Options, limit: int) -> int | None:
            limited = replace(self.request, options=options, memory_limit=limit)
            with suppress(InfeasibleError, OptionsError):
                return replace(self, request=limited).solved(timings).figures()[1].peak_bytes
            return None

        limit = memory_limit_of(self.request)
        return pipeline_infeasible(self.request, self.layout, self.microbatches, limit, held) or error


@dataclass(frozen=True)
class _Solved:
    """A solved pipeline of ``request``; ``inside`` is the request for the mesh of one stage."""

    request: PlanRequest
    inside: PlanRequest
    timings: Timings
    made: PipelineSolution

    def candidate(self, warning: str = "") -> Candidate:
        make = partial(staged_plan, self.request, self.inside, self.made, self.timings, warning)
        return Candidate(staged_predicted(self.made).step_seconds, self.made.layout, make, self.figures)

    def figures(self) -> tuple[str, Predicted]:
        made = self.made
        where = named_axes(self.inside, made.whole.assignment, made.whole.instance.graph)
        schedule = made.pipeline.schedule
        count = f"{schedule.microbatches} microbatch{'es' if schedule.microbatches > 1 else ''}"
        if made.layout.stages == 1:
            return f"{where}, {count}", staged_predicted(made)
        stages = f"{made.layout.stages} stages" + (f" x {where}" if math.prod(self.inside.mesh) > 1 else "")
        return f"{stages}, {schedule.name}, {count}", staged_predicted(made)

    def improved(self) -> Candidate:
        """The pipeline under a schedule made to measure, where that is asked for, or nothing is and it pays."""
        options = self.request.options
        if options.schedule not in (None, SOLVED):
            return self.candidate()
        limit = float(memory_limit_of(self.request))
        measure = Measure(options.schedule == SOLVED, limit, options.time_limit, options.solver_seed)
        better, kept = with_solved_schedule(self.made, measure)
        return replace(self, made=better).candidate(kept)
