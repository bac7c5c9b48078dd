"""The best plan there is: with stages or without, on every way to lay the devices out.

A plan without stages is sought first. Stages are then tried where they could win: the devices cannot take less than
their share of what one device computes, and a pipeline is taken to idle besides, by a sixth of what 1F1B does. That is
what ZB-V leaves with equal chunks; uneven ones might leave less, so that this part of the bound is a heuristic.
``Options(stages=..., microbatches=..., schedule=...)`` fixes any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.cost import usable_host_bytes
from autopar.cost.point_to_point import message_rate
from autopar.passes.annotate import annotate
from autopar.passes.microbatch import split_inputs

from .assignment import Assignment
from .axis_names import default_names
from .cluster import Cluster
from .errors import InfeasibleError, OptionsError
from .exact_stages import exact_stages, fullest, peak, search_within, with_memory
from .figures import plan_line, predicted
from .graph import VIEWS, Graph
from .infeasible_pipeline import pipeline_infeasible
from .options import SOLVED, Options
from .plan import Plan, Predicted
from .planner import Answer, Question, Timings, axes_are_fixed, memory_limit_of, mesh_candidates, solve_mesh
from .prices import Prices
from .stage_meshes import StageMeshes, layouts, microbatch_counts
from .stage_plan import gradient_values, new_nodes, new_strategies, staged_holdings, staged_lines, staged_predicted
from .stage_programs import StagePrograms
from .stage_search import Ask, StagedAnswer
from .stage_segments import stage_pins
from .stage_solved import Measure, with_solved_schedule
from .step_graphs import graph_hash, pipelined_graph, step_graph
from .write_plan import make_plan

# How many placement programs may be solved to see whether stages pay, times the operations of the graph: at least one.
EFFORT = 2000
# A pipeline this many times slower than the best plan without is not helped by more microbatches.
HOPELESS = 1.5
_NO_LOSS = (
    "a step in stages or microbatches runs forward and backward in turns, so the loss must be part of it, but the "
    "model returns none for this batch: pass the labels that the model makes it of, or loss_fn, called as "
    "loss_fn(output) or loss_fn(output, batch)"
)
# Pipelines of processes that share cores took up to this many times their price, relative to plans without stages
# (benchmarks/results/two_hosts.json, pipeline_plans.json).
SHARED_CORES_DOUBT = 1.2


@dataclass(frozen=True)
class Found:
    """A solved alternative: ``make`` writes its plan, ``figures`` its name and predictions; of those of one ``layout``
    (None: without stages) only the quickest is listed beside the answer. ``baselines`` were priced with it. A pipeline
    is ``improved`` by a schedule of its own."""

    seconds: float
    layout: StageMeshes | None
    make: Callable[[], Plan]
    figures: Callable[[], tuple[str, Predicted]]
    baselines: Mapping[str, Predicted | None] = field(default_factory=dict)
    improved: Callable[[], Found] | None = None


def answer(question: Question, timings: Timings) -> Plan:
    """The best plan for ``question``.

    Raises:
        InfeasibleError: nothing fits into memory.
        OptionsError: pins, stages, microbatches or a schedule that cannot be had.
    """
    _check_schedule(question)
    pinned, placed = stage_pins(question.options.pins)
    asked = replace(question, options=replace(question.options, pins=placed))
    found: list[Found] = []
    failure: InfeasibleError | None = None
    if _may_be_whole(question, pinned):
        found, failure = _without_stages(asked, timings)
    best = min((one.seconds for one in found), default=math.inf)
    staged, complaint = _with_stages(asked, pinned, timings, best)
    found += staged
    if not found:
        raise failure or complaint()
    chosen = min(found, key=lambda one: one.seconds * _doubt(question, one))
    passed = _passed_over(found, chosen)
    if chosen.improved is not None:
        with timings.phase("schedule"):
            chosen = chosen.improved()
    with timings.phase("report"):
        plan, listed = chosen.make(), _also_priced(found, chosen)
        warnings = (*plan.warnings, *passed, *_warnings_of_time(question, timings))
        return replace(plan, pinned=dict(question.options.pins), baselines=listed, warnings=warnings)


def _check_schedule(question: Question) -> None:
    options, devices = question.options, math.prod(question.mesh)
    if options.schedule is not None and (devices == 1 or options.stages == 1) and options.microbatches in (None, 1):
        why = f"stages={options.stages}" if options.stages is not None else f"the mesh {question.mesh} has one device"
        raise OptionsError(
            f"schedule={options.schedule!r} is the order of work in pipeline stages, but {why}: leave schedule out, "
            "or give a mesh of several devices and stages=2 or more (or None to search)"
        )


def _doubt(question: Question, one: Found) -> float:
    """What the seconds of a pipeline that nobody asked for count as, where processes share cores."""
    options = question.options
    asked = options.stages is not None or options.schedule is not None
    is_pipeline = one.layout is not None and one.layout.stages > 1
    return SHARED_CORES_DOUBT if is_pipeline and not asked and question.cluster.sharing > 1 else 1.0


def _passed_over(found: list[Found], chosen: Found) -> Iterator[str]:
    quickest = min(found, key=lambda one: one.seconds)
    if quickest.seconds < chosen.seconds and quickest.layout is not None:
        yield (
            f"{quickest.layout.stages} stages are priced at {quickest.seconds / chosen.seconds:.0%} of this, but where "
            f"processes share cores stages took up to {SHARED_CORES_DOUBT - 1:.0%} more than their price, beside plans "
            f"without; Options(stages={quickest.layout.stages}) takes them"
        )


def _warnings_of_time(question: Question, timings: Timings) -> Iterator[str]:
    limit = question.options.time_limit
    if timings.is_spent(limit):
        yield f"solving took all of time_limit={limit:g} s: other pipelines or placements may be better"


def _also_priced(found: list[Found], best: Found) -> dict[str, Predicted | None]:
    """What else was priced, by name: the baselines on the best mesh without stages, and the quickest of every other
    way to divide the devices."""
    quickest: dict[StageMeshes | None, Found] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        quickest.setdefault(one.layout, one)
    listed = {name: priced for one in quickest.values() for name, priced in one.baselines.items()}
    listed.update(one.figures() for one in quickest.values() if one.layout != best.layout)
    return listed


def _may_be_whole(question: Question, pinned: Mapping[str, str]) -> bool:
    options = question.options
    return options.stages in (None, 1) and options.microbatches in (None, 1) and not pinned and not options.schedule


def _without_stages(question: Question, timings: Timings) -> tuple[list[Found], InfeasibleError | None]:
    """The best plan on every candidate mesh, or why there is none."""
    graph = step_graph(question.graph, question.loss, question.batch)
    found: list[Found] = []
    failure: InfeasibleError | None = None
    for mesh in mesh_candidates(question):
        asked = replace(question, mesh=mesh)
        try:
            solved, priced = solve_mesh(asked, graph, timings)
        except InfeasibleError as error:
            failure = failure or error
            continue
        make = partial(make_plan, asked, graph, solved, priced, timings)
        figures = partial(_whole_figures, asked, solved)
        found.append(Found(solved.account.seconds, None, make, figures, priced))
    return found, failure


def _whole_figures(question: Question, solved: Answer) -> tuple[str, Predicted]:
    figures = predicted(solved.account, solved.instance, question.cluster)
    return f"no stages, {_axes(question, solved.assignment, solved.instance.graph)}", figures


def _axes(question: Question, assignment: Assignment, graph: Graph) -> str:
    """``(dp=2, tp=2)``."""
    names = question.axis_names or default_names(question.mesh, assignment, graph)
    return f"({', '.join(f'{name}={n}' for name, n in zip(names, question.mesh, strict=True))})"


def _with_stages(
    question: Question, pinned: Mapping[str, str], timings: Timings, best: float
) -> tuple[list[Found], Callable[[], Exception]]:
    """Every pipeline (and gradient accumulation) worth trying, and what makes the last reason why one was not possible.
    A reason is an error only if nothing else was found, or if just this was asked for."""
    if question.loss is None and any(o.kind == "gradient" and o.value is not None for o in question.graph.outputs):
        return [], lambda: OptionsError(_NO_LOSS)
    whole = pipelined_graph(question.graph, question.loss, question.batch)
    found: list[Found] = []
    complaint: Callable[[], Exception] = partial(AssertionError, "nothing was tried")
    for layout, counts in _attempts(question, whole, best):
        if timings.is_spent(question.options.time_limit) and (found or math.isfinite(best)):
            break
        last, left = math.inf, list(counts)
        while left:
            count = left.pop(0)
            try:
                made = _staged(
                    question, pinned, layout, count, whole, timings, min([best, *(f.seconds for f in found)])
                )
            except InfeasibleError as error:
                complaint = partial(_too_full, error, question, pinned, layout, count, whole)
                continue
            except OptionsError as error:
                if question.options.microbatches is not None:
                    raise
                complaint = partial(_itself, error)
                # Where samples do not come apart, as in batch norm, there is the whole batch.
                left = [1] if count > 1 and math.isinf(best) else []
                continue
            found.append(made)
            # More microbatches idle less and launch more: once that does not pay, it will not again.
            if made.seconds > min(last, HOPELESS * best):
                break
            last = made.seconds
    return found, complaint


def _itself(error: Exception) -> Exception:
    return error


def _too_full(
    error: InfeasibleError,
    question: Question,
    pinned: Mapping[str, str],
    layout: StageMeshes,
    count: int,
    whole: Graph,
) -> InfeasibleError:
    """The error for a pipeline, that of most microbatches tried, which fits into no device; ``error`` itself, if no
    memory was found that helps. What the refused search took of its time is not taken off the search for a limit."""
    timings = Timings()

    def held(options: Options, limit: int) -> int | None:
        asked = replace(question, options=options, memory_limit=limit)
        with suppress(InfeasibleError, OptionsError):
            return _staged(asked, pinned, layout, count, whole, timings).figures()[1].peak_bytes
        return None

    return pipeline_infeasible(question, layout, count, memory_limit_of(question), held) or error


def _attempts(question: Question, graph: Graph, best: float) -> Iterator[tuple[StageMeshes, tuple[int, ...]]]:
    """Layouts with the numbers of microbatches to try, given the seconds of the best plan without stages."""
    options, devices = question.options, math.prod(question.mesh)
    one_stage = StageMeshes(1, question.mesh, tuple(range(len(question.mesh))))
    if options.stages in (None, 1) and options.microbatches is not None and options.microbatches > 1:
        yield one_stage, (options.microbatches,)
    if options.stages == 1 and options.microbatches is None and math.isinf(best):
        yield one_stage, tuple(n for n in microbatch_counts(question.batch, 1, None) if n > 1)
    if options.stages == 1 or (options.stages is None and (devices == 1 or keeps_axes(question))):
        return
    every = [
        (layout, microbatch_counts(question.batch, layout.stages, options.microbatches))
        for layout in layouts(question.mesh, options.stages)
    ]
    if options.stages is not None or options.schedule is not None:
        yield from every
    else:
        yield from _promising(question, graph, best, every)


def keeps_axes(question: Question) -> bool:
    """Whether what is fixed speaks of the axes of the mesh, so that they are not given to stages unasked."""
    options = question.options
    fixed = options.zero is not None or axes_are_fixed(question)
    return fixed and options.schedule is None and options.microbatches is None


def _promising(
    question: Question, graph: Graph, best: float, every: list[tuple[StageMeshes, tuple[int, ...]]]
) -> Iterator[tuple[StageMeshes, tuple[int, ...]]]:
    """Of all attempts those that could win, the one with the least bound of each layout first, as many as the effort
    allows."""
    devices = math.prod(question.mesh)
    alone, launches = single_device_seconds(question, graph)
    idle = partial(_idle_share, question.cluster)
    found: list[tuple[float, int, StageMeshes, int]] = []
    for layout, counts in every:
        bounds = [
            (alone + (n - 1) * launches) / devices * (1.0 + idle(layout.stages, n)) + _hops(question, layout)
            for n in counts
        ]
        ranked = sorted(zip(bounds, counts, strict=True))
        found += [(bound, turn, layout, n) for turn, (bound, n) in enumerate(ranked) if bound < best]
    found.sort(key=lambda one: (one[1], one[0]))
    # Where nothing fits without stages there is more to find.
    most = max(4 if math.isinf(best) else 1, EFFORT // len(graph))
    yield from ((layout, (n,)) for _, _, layout, n in found[:most])


def _idle_share(cluster: Cluster, stages: int, microbatches: int) -> float:
    """Idle over busy time that a pipeline is taken to have at least: the least of any named schedule, a sixth of
    1F1B's, but none where idle ranks leave their processors to others."""
    return 0.0 if cluster.cores < cluster.sharing else (stages - 1) / (6.0 * microbatches)


def _hops(question: Question, layout: StageMeshes) -> float:
    """Latencies on the way of a microbatch through all stages and back."""
    devices = math.prod(layout.mesh)
    pairs = ((s, s + 1) for s in range(layout.stages - 1))
    return 2.0 * sum(message_rate(question.cluster, s, t, devices)[0] for s, t in pairs)


def single_device_seconds(question: Question, graph: Graph) -> tuple[float, float]:
    """Seconds of computing a step on one device, and what of it is paid again for each further microbatch: launching.
    However it is divided, the devices take this in sum."""
    alone = annotate(graph, (1,))
    prices = Prices.of(question.cluster, (1,), alone)
    nodes = [node for node in graph.nodes if not node.is_placeholder]
    seconds = sum(
        prices.node(node, tuple(map(graph.type_of, node.operands)), alone.strategies[node.name][0]) for node in nodes
    )
    return seconds, question.cluster.device.launch_seconds * sum(node.op not in VIEWS for node in nodes)


def _staged(
    question: Question,
    pinned: Mapping[str, str],
    layout: StageMeshes,
    count: int,
    whole: Graph,
    timings: Timings,
    best: float = math.inf,
) -> Found:
    """The quickest pipeline of one layout; ``best``: seconds of the best plan known."""
    names = tuple(question.axis_names[axis] for axis in layout.axes) if question.axis_names else ()
    inside = replace(question, mesh=layout.mesh, axis_names=names)
    solve = StagePrograms(inside, best, timings).solve
    limit = float(memory_limit_of(question))
    host, inputs = usable_host_bytes(question.cluster), split_inputs(question.graph)
    optimizer, schedule = question.options.optimizer, question.options.schedule
    made = search_within(Ask(whole, inputs, layout, count, schedule, dict(pinned), limit, optimizer, solve, host))
    asked = replace(inside, mesh=made.whole.prices.mesh)
    found = _found(question, asked, made, timings)
    return replace(found, improved=partial(_improved, question, asked, made, timings))


def _found(question: Question, asked: Question, made: StagedAnswer, timings: Timings, warning: str = "") -> Found:
    make = partial(staged_plan, question, asked, made, timings, warning)
    return Found(staged_predicted(made).step_seconds, made.layout, make, partial(_staged_figures, asked, made))


def _staged_figures(asked: Question, made: StagedAnswer) -> tuple[str, Predicted]:
    where = _axes(asked, made.whole.assignment, made.whole.instance.graph)
    schedule = made.pipeline.schedule
    count = f"{schedule.microbatches} microbatch{'es' if schedule.microbatches > 1 else ''}"
    if made.layout.stages == 1:
        return f"{where}, {count}", staged_predicted(made)
    stages = f"{made.layout.stages} stages" + (f" x {where}" if math.prod(asked.mesh) > 1 else "")
    return f"{stages}, {schedule.name}, {count}", staged_predicted(made)


def _improved(question: Question, asked: Question, made: StagedAnswer, timings: Timings) -> Found:
    """The pipeline under a schedule made to measure, where that is asked for, or nothing is and it pays."""
    options = question.options
    if options.schedule not in (None, SOLVED):
        return _found(question, asked, made, timings)
    limit = float(memory_limit_of(question))
    measure = Measure(options.schedule == SOLVED, limit, options.optimizer, options.time_limit, options.seed or 0)
    better, kept = with_solved_schedule(made, measure)
    return _found(question, asked, better, timings, kept)


def staged_plan(question: Question, asked: Question, made: StagedAnswer, timings: Timings, warning: str = "") -> Plan:
    """The plan of a pipeline: that of the uncut graph on the mesh inside a stage (``asked``), and what staging
    changes."""
    graph = step_graph(question.graph, question.loss, question.batch)
    limited = replace(asked, memory_limit=memory_limit_of(question))
    base = make_plan(limited, made.whole.instance.graph, made.whole, {}, timings)
    several = made.layout.stages > 1
    exact = exact_stages(made)
    return replace(
        base,
        predicted=staged_predicted(made) if exact is None else with_memory(staged_predicted(made), exact),
        lines=staged_lines(made.bill, plan_line),
        strategies={**base.strategies, **new_strategies(made)},
        nodes={**base.nodes, **new_nodes(made, base.nodes)},
        gradient_values=gradient_values(made),
        holdings=staged_holdings(made) if exact is None else exact[fullest(exact)].holdings,
        stages=made.layout.stages,
        schedule=made.pipeline.schedule.name if several else None,
        microbatches=made.pipeline.schedule.microbatches,
        pipeline=made.pipeline if exact is None else replace(made.pipeline, peaks=tuple(map(peak, exact))),
        graph_hash=graph_hash(graph),
        warnings=(*base.warnings, *filter(None, [warning])),
    )
