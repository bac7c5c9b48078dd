"""Checks that the parts of a plan belong together: :meth:`autopar.plans.plan.Plan.validate`.

A plan that autopar writes always passes. A plan that somebody edited passes if every name in it refers to something
that it contains, every placement is possible, and its figures are the sums of its lines. Whether an operation can run
as the plan says is checked where its graph is known (:mod:`autopar.planner.check_strategies`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import get_args

from autopar.errors import OptionsError
from autopar.ir.module_paths import did_you_mean
from autopar.ir.node import RECOMPUTED
from autopar.ir.placements import (
    REPLICATE,
    Placements,
    Strategy,
    is_shard,
    is_valid,
    parse_placements,
    shard_before,
    short,
)
from autopar.ir.plan_record import LOSS_SCALE, LineKind, PlanRecord, Predicted, ReshardStep
from autopar.ir.program import COLLECTIVES
from autopar.optimizers import OPTIMIZERS
from autopar.plans.views.stages import busiest_stage

from .field_types import wrong_fields
from .moves import moves
from .resting import resting

# Findings that a message names. Chosen: what a reader takes in.
SHOWN = 5
# Relative tolerance for sums of floating-point numbers in another order.
# Chosen: far above the rounding of float64 in sums of some thousand lines, far below anything a person edits.
CLOSE = 1e-6
STEP_KINDS = (*COLLECTIVES, "slice", "partial")
_TYPES = r"(\w+\[[\d, ]*\](, \w+\[[\d, ]*\])*)?"
Shapes = tuple[tuple[int, ...], ...] | None
HOLDINGS = ("weight", "gradient", "optimizer", "activation", "input")


def validate(plan: PlanRecord) -> None:
    """Raises :class:`OptionsError` that names the first few problems."""
    problems = list(itertools.islice(wrong_fields(plan, PlanRecord, ""), SHOWN)) or list(
        itertools.islice(_wrong(plan), SHOWN)
    )
    if problems:
        note = "; there may be more" if len(problems) == SHOWN else ""
        raise OptionsError(f"this is not a valid plan: {'; '.join(problems)}{note}")


def _wrong(plan: PlanRecord) -> Iterator[str]:
    """The problems of the first check that finds any. Each check relies on those before it."""
    for check in (_settings, _names, _places, _lines, moves, resting, _figures, _pipeline):
        problems = list(itertools.islice(check(plan), SHOWN))
        if problems:
            yield from problems
            return


def _settings(plan: PlanRecord) -> Iterator[str]:
    if not plan.mesh or min(plan.mesh) < 1 or math.prod(plan.mesh) > 1 << 30:
        yield f"mesh is {plan.mesh}: its axes have at least one device each"
    if len(plan.axis_names) != len(plan.mesh) or len(set(plan.axis_names)) < len(plan.axis_names):
        yield f"axis_names {plan.axis_names} do not name each axis of the mesh {plan.mesh}"
    yield from _meshes(plan)
    for name in ("batch", "stages", "microbatches", "memory_limit"):
        if getattr(plan, name) < 1:
            yield f"{name} is {getattr(plan, name)}, not a positive number"
    if (plan.stages > 1 or plan.microbatches > 1) != (plan.pipeline is not None):
        with_or_without = "without a pipeline" if plan.pipeline is None else "with a pipeline"
        yield f"the plan has {plan.stages} stages and {plan.microbatches} microbatches, but comes {with_or_without}"
    if any(each and len(each) != plan.stage_meshes.devices for each in (plan.device_peaks, plan.device_limits)):
        peaks, limits = len(plan.device_peaks), len(plan.device_limits)
        yield f"device_peaks and device_limits are those of {peaks} and {limits} devices, not those of all"
    if plan.sync is not None and min(plan.sync.replicas, plan.sync.every) < 1:
        yield f"sync has {plan.sync.replicas} replicas that exchange every {plan.sync.every} steps: at least 1 of each"
    yield from _searched(plan)
    if plan.optimizer not in OPTIMIZERS:
        yield f"optimizer is {plan.optimizer!r}{did_you_mean(plan.optimizer, list(OPTIMIZERS))}"
    if plan.imbalance is not None and plan.imbalance < 1:
        yield f"imbalance is {plan.imbalance}, below 1"
    for name in ("solve_seconds", "gap"):
        if getattr(plan, name) < 0:
            yield f"{name} is {getattr(plan, name)}, below 0"


def _searched(plan: PlanRecord) -> Iterator[str]:
    """Checks what the search says that it covered."""
    found = plan.searched
    if found is None:
        return
    counts = found.divisions, found.indivisible, found.solved, found.excluded, found.left
    if min(counts) < 0 or found.bound < 0:
        yield f"searched counts {', '.join(map(str, counts))} and bounds {found.bound}: none may be below 0"
    for each in found.tried:
        if each.seconds < 0 or each.divisions < 0:
            yield f"searched.tried: {each.described!r} takes {each.seconds} seconds, of {each.divisions} divisions"
    covered = sum(each.divisions for each in found.tried)
    if covered not in (0, found.solved):  # 0: written before they were counted.
        yield f"searched.solved is {found.solved}, but searched.tried adds up to {covered}"


def _meshes(plan: PlanRecord) -> Iterator[str]:
    """Checks the meshes of unequal stages."""
    meshes = plan.pipeline.meshes if plan.pipeline is not None else ()
    if not meshes:
        return
    if len(meshes) != plan.stages or any(len(mesh) != len(plan.mesh) or min(mesh, default=0) < 1 for mesh in meshes):
        yield f"pipeline.meshes are {meshes} for {plan.stages} stages with the axes of {plan.mesh}"
    elif plan.mesh != plan.stage_meshes.largest:
        yield f"mesh is {plan.mesh}, but the largest of pipeline.meshes is {plan.stage_meshes.largest}"


def _unknown(where: str, names: Iterable[str], present: Mapping[str, object]) -> Iterator[str]:
    """``names`` in ``where`` that are not in ``present``."""
    for name in names:
        if name not in present:
            yield f"{where} names {name!r}, which the plan does not have{did_you_mean(name, list(present))}"


def _names(plan: PlanRecord) -> Iterator[str]:
    """Checks that every name is the name of a node or parameter."""
    nodes = plan.nodes
    parameters = plan.parameter_nodes
    operations = {name: node for name, node in nodes.items() if node.op != "param"}
    yield from _unknown("strategies", plan.strategies, {**operations, **dict.fromkeys(plan.recomputed)})
    yield from (f"strategies lacks {name!r}, which nodes has" for name in operations if name not in plan.strategies)
    yield from _unknown("parameters", plan.parameters, parameters)
    yield from (f"parameters lacks {path!r}, which nodes has" for path in parameters.keys() - plan.parameters)
    if len(parameters) < len(nodes) - len(operations):
        yield "two nodes are the same parameter"
    for name, node in nodes.items():
        yield from _unknown(f"nodes[{name!r}]", (*node.operands, *filter(None, [node.tied])), nodes)
    # A recomputed activation has a strategy, but only its copy is a node.
    yield from _unknown("alternatives", plan.alternatives, {**nodes, **plan.strategies})
    yield from _unknown("recomputed", plan.recomputed, plan.strategies)
    yield from _unknown("offloaded", plan.offloaded, {**nodes, **plan.strategies})
    yield from _unknown("module_nodes", plan.module_nodes.values(), operations)
    yield from _unknown("outputs", plan.outputs, plan.module_nodes)
    yield from _unknown("gradient_values", plan.gradient_values, plan.parameters)
    yield from _unknown("tied", plan.tied.values(), plan.parameters)
    for values in plan.gradient_values.values():
        yield from _unknown("gradient_values", (value.partition(".")[0] for value in values.split(",")), nodes)
    yield from _unknown("holdings", (holding.name for holding in plan.holdings), nodes)
    named = (line.name for line in plan.lines if line.kind != "hidden" and line.name != LOSS_SCALE)
    yield from _unknown("lines", named, nodes)
    if plan.pipeline is not None:
        yield from _unknown("pipeline", (*plan.pipeline.cuts, *_wired(plan)), nodes)
        yield from _unknown("pipeline.borrowed", (path for _, path in plan.pipeline.borrowed), plan.parameters)
        chunks = plan.pipeline.schedule.chunks
        yield from (
            f"pipeline.borrowed names chunk {chunk} of {chunks}"
            for chunk, _ in plan.pipeline.borrowed
            if not 0 <= chunk < chunks
        )


def _wired(plan: PlanRecord) -> Iterator[str]:
    """The nodes whose values are sent between chunks; other results than the first are numbered."""
    for edge in plan.pipeline.wires if plan.pipeline is not None else ():
        node, result, number = edge.name.rpartition("_result")
        yield node if result and number.isdecimal() and edge.name not in plan.nodes else edge.name


@lru_cache(maxsize=1 << 12)
def _shapes(text: str) -> Shapes:
    """The shapes in the types of a node, such as ``f32[8, 4], i64[]``; None if ``text`` is not a list of types."""
    plain = text.partition(", stored ")[0]
    if not re.fullmatch(_TYPES, plain):
        return None
    return tuple(tuple(map(int, re.findall(r"\d+", dims))) for dims in re.findall(r"\[([\d, ]*)\]", plain))


def _places(plan: PlanRecord) -> Iterator[str]:
    """Checks that every placement is possible for its shape."""
    shapes = {name: _shapes(node.type) for name, node in plan.nodes.items()}
    problems: dict[object, list[str]] = {}
    for name, strategy in plan.strategies.items():
        results = shapes[name] if name in plan.nodes else ()
        # Results that are None have no type.
        if results is None or len(results) > len(strategy.outputs):
            yield f"nodes[{name!r}] has another number of results than its strategy, {len(strategy.outputs)}"
            results = None
        found = results if results and len(results) == len(strategy.outputs) else None
        key = id(strategy), found
        if key not in problems:  # Of few strategies and shapes: those of a plan that was read are shared by its nodes.
            problems[key] = list(_impossible_strategy(plan, strategy, found))
        yield from (f"strategies[{name!r}]{problem}" for problem in problems[key])
    yield from _resting_places(plan, shapes)
    for path, place in plan.outputs.items():
        node = plan.module_nodes[path]
        if (place,) != plan.strategies[node].outputs[:1]:
            yield f"outputs[{path!r}] is {short(place)}, but {node!r}, which computes it, has another placement"
    yield from _copies(plan)


def _impossible_strategy(plan: PlanRecord, strategy: Strategy, shapes: Shapes) -> Iterator[str]:
    """``shapes``: those of its results, if they are known."""
    for place, shape in zip(strategy.outputs, shapes or [None] * len(strategy.outputs), strict=True):
        yield from _impossible(plan, place, shape)
    for place in strategy.inputs:
        yield from _impossible(plan, place, None)


def _resting_places(plan: PlanRecord, shapes: Mapping[str, Shapes]) -> Iterator[str]:
    for path, node in plan.parameter_nodes.items():
        resting, types = plan.parameters[path], shapes[node]
        if not types:
            yield f"nodes[{node!r}] has the type {plan.nodes[node].type!r}"
        for place in (resting.weight, resting.gradient, resting.optimizer):
            problems = _impossible(plan, place, types[0] if types else None)
            yield from (f"parameters[{path!r}]{problem}" for problem in problems)
            if not all(p == REPLICATE or is_shard(p) for p in place):
                yield f"parameters[{path!r}]: {short(place)} is a partial sum; a parameter rests as R or S"
    for path, values in plan.gradient_values.items():
        for value in values.split(","):
            producer, dot, index = value.partition(".")
            count = 1 if producer not in plan.strategies else len(plan.strategies[producer].outputs)
            if (dot and not re.fullmatch(r"\d{1,6}", index)) or int(index or 0) >= count:
                yield f"gradient_values[{path!r}] is {value!r}: {producer!r} has {count} results"


def _impossible(plan: PlanRecord, place: Placements, shape: tuple[int, ...] | None) -> Iterator[str]:
    """What is wrong with a placement, to follow the words where it stands."""
    if len(place) != len(plan.mesh):
        yield f" is placed {short(place)} on the mesh {plan.mesh}"
    elif any(shard_before(p) < 1 for p in place):
        yield f": {short(place)} divides a dim into 0 parts"
    elif shape is not None and not any(is_valid(place, shape, mesh) for mesh in plan.stage_meshes.meshes):
        yield f": {short(place)} is not a placement of shape {list(shape)} on the {plan.stage_meshes}"


def _copies(plan: PlanRecord) -> Iterator[str]:
    """Checks that nodes recomputed in backward have the strategies of their originals."""
    for name in plan.recomputed:
        copy = name + RECOMPUTED
        if copy in plan.strategies and plan.strategies[copy] != plan.strategies[name]:
            yield f"strategies[{copy!r}] differs from that of {name!r}, which it recomputes"


def _lines(plan: PlanRecord) -> Iterator[str]:
    kinds, problems = get_args(LineKind), dict[int, list[str]]()
    for position, line in enumerate(plan.lines):
        where = f"lines[{position}] ({line.kind} {line.name})"
        if line.kind not in kinds or line.phase not in ("forward", "backward"):
            yield f"{where}: {line.kind!r} in {line.phase!r} is not known; one of {', '.join(kinds)}"
        if line.times < 1 or not 0 <= line.stage < plan.stages:
            yield f"{where}: {line.times} times in stage {line.stage} of {plan.stages}"
        if (line.seconds > 0) if line.kind == "hidden" else (line.seconds < 0):
            yield f"{where}: {line.seconds} seconds"
        if line.kind in ("reshard", "weight") and not line.steps:
            yield f"{where}: no steps, but it moves a value"
        if id(line.steps) not in problems:  # Lines of a plan that was read share them.
            problems[id(line.steps)] = list(_steps(plan, line.steps))
        yield from (f"{where}: {problem}" for problem in problems[id(line.steps)])
    for holding in plan.holdings:
        if holding.kind not in HOLDINGS or holding.bytes < 0:
            yield f"holdings: {holding.bytes} bytes of {holding.kind!r} for {holding.name}"


def _steps(plan: PlanRecord, steps: Sequence[ReshardStep]) -> Iterator[str]:
    """Checks that the hops of a line lead from one placement to the next."""
    for step in steps:
        if step.kind not in STEP_KINDS or step.bytes < 0 or not all(axis < len(plan.mesh) for axis in step.axes):
            yield f"{step.kind!r} of {step.bytes} bytes over axes {list(step.axes)} of the mesh {plan.mesh}"
        for text in (step.source, step.target):
            try:
                fits = len(parse_placements(text)) == len(plan.mesh)
            except OptionsError:
                fits = False
            if not fits:
                yield f"{text!r} is not a placement on the mesh {plan.mesh}"
        if step.bytes > 0 and step.kind not in COLLECTIVES:
            yield f"{step.kind!r} moves {step.bytes} bytes, but is local"
    for first, second in itertools.pairwise(steps):
        if first.target != second.source:
            yield f"one step ends at {first.target}, the next begins at {second.source}"


def _gradient_lines(plan: PlanRecord) -> Iterator[str]:
    """Checks that each gradient that is moved has a line."""
    from autopar.plans.views.why import moved_gradients

    listed = Counter(line.name for line in plan.lines if line.kind == "gradient")
    needed = moved_gradients(plan)
    for name in {*listed, *needed}:
        if listed[name] != needed[name]:
            yield f"lines moves {listed[name]} gradients from {name!r}, but the placements require {needed[name]}"


def _figures(plan: PlanRecord) -> Iterator[str]:
    yield from _gradient_lines(plan)
    baselines = ((f"baselines[{name!r}]", baseline) for name, baseline in plan.baselines.items())
    for name, prediction in (("predicted", plan.predicted), *baselines):
        if prediction is not None:
            parts = prediction.to_dict().items()
            yield from (f"{name}.{part} is {value}, below 0" for part, value in parts if value < 0)
            yield from _parts(name, prediction)
    busiest = busiest_stage(plan)
    step = sum(line.seconds for line in plan.lines if line.stage == busiest)
    step += plan.predicted.bubble_seconds - plan.predicted.freed_seconds
    if not math.isclose(step, plan.predicted.step_seconds, rel_tol=CLOSE, abs_tol=1e-12):
        yield f"predicted.step_seconds is {plan.predicted.step_seconds}, but the lines add up to {step}"
    peak = sum(holding.bytes for holding in plan.holdings) + plan.predicted.temporary_bytes
    if peak != plan.predicted.peak_bytes:
        yield f"predicted.peak_bytes is {plan.predicted.peak_bytes}, but holdings and temporary bytes add up to {peak}"
    for name, alternatives in plan.alternatives.items():
        if alternatives.possible < len(alternatives.cheapest) or alternatives.impossible < 0:
            yield f"alternatives[{name!r}] lists {len(alternatives.cheapest)} of {alternatives.possible}"


def _parts(name: str, p: Predicted) -> Iterator[str]:
    """Checks that a prediction is the sum of its parts."""
    step = p.compute_seconds + p.comm_seconds + p.bubble_seconds - p.freed_seconds
    if not math.isclose(step, p.step_seconds, rel_tol=CLOSE, abs_tol=1e-12):
        yield f"{name}.step_seconds is {p.step_seconds}, but its parts add up to {step}"
    peak = sum(p.peak_parts.values())
    if peak != p.peak_bytes:
        yield f"{name}.peak_bytes is {p.peak_bytes}, but its parts add up to {peak}"


def _pipeline(plan: PlanRecord) -> Iterator[str]:
    pipeline = plan.pipeline
    if pipeline is None:
        return
    schedule, chunks = pipeline.schedule, pipeline.chunks
    if (schedule.stages, schedule.microbatches, schedule.chunks) != (plan.stages, plan.microbatches, chunks):
        yield (
            f"the schedule has {schedule.stages} stages, {schedule.microbatches} microbatches and {schedule.chunks} "
            f"chunks, the plan {plan.stages}, {plan.microbatches} and {chunks}"
        )
    if len(pipeline.peaks) != plan.stages or min(pipeline.peaks, default=0) < 0:
        yield f"pipeline.peaks are {pipeline.peaks} for {plan.stages} stages"
    if len(pipeline.chunk_figures) != chunks or pipeline.update_seconds < 0:
        yield f"pipeline.chunk_figures are those of {len(pipeline.chunk_figures)} chunks, not {chunks}"
    if len(set(pipeline.cuts)) < len(pipeline.cuts):
        yield "pipeline.cuts begin two chunks at one node"
    for link in pipeline.link_figures:
        if not 0 <= link.source < link.target < chunks or link.bandwidth <= 0 or link.latency < 0:
            yield f"pipeline.link_figures from {link.source} to {link.target} of {chunks} chunks"
    described = {(link.source, link.target) for link in pipeline.link_figures}
    for source, target in {(edge.source, edge.target) for edge in schedule.edges} - described:
        yield f"pipeline.link_figures lack those from {source} to {target}"
    for edge, place in pipeline.wires.items():
        if edge.source == edge.target or not all(0 <= c < chunks for c in (edge.source, edge.target)):
            yield f"pipeline.wires from {edge.source} to {edge.target} of {chunks} chunks"
        yield from (f"pipeline.wires of {edge.name!r}{problem}" for problem in _impossible(plan, place, None))
    if any(each and len(each) != plan.stages for each in (pipeline.limits, pipeline.devices)):
        yield f"pipeline.limits {pipeline.limits} and devices {pipeline.devices} are not those of {plan.stages} stages"
    if pipeline.hosts and len(pipeline.hosts) != plan.stages:
        yield f"pipeline.hosts are {pipeline.hosts} for {plan.stages} stages"
    if len(pipeline.speeds) < max(Counter(pipeline.hosts).values(), default=0):
        yield f"pipeline.speeds {pipeline.speeds} are too few for the stages on pipeline.hosts {pipeline.hosts}"
