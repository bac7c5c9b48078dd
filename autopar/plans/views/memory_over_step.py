"""The bytes that devices hold over a step, according to the plan's prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from autopar.ir.plan_record import PlanRecord
from autopar.schedule.timeline import Timeline

from .stages import fullest_stage
from .step_timeline import step_timeline

Levels = tuple[tuple[float, float], ...]
_COMPUTE = "compute "


@dataclass(frozen=True)
class MemoryOverStep:
    """What the devices of one stage hold during a step of ``seconds``.

    Attributes:
        stage: the stage that holds most.
        levels: (seconds, bytes held from then on), ascending in time.
        resting: bytes of these that are held all the time: weights, gradients, optimizer state, inputs.
        temporary: the most that operations and collectives take besides while they run. The plan counts it on top of
            everything else, whenever it is needed.
        peak: the most bytes by the plan, which rehearses each stage; ``levels`` of stages are of the simulated
            schedule, and can differ from it by a few per cent.
    """

    stage: int
    seconds: float
    levels: Levels
    resting: float
    temporary: float
    peak: float


def memory_over_step(plan: PlanRecord, timeline: Timeline | None = None) -> MemoryOverStep:
    """The memory of the fullest devices. ``timeline``: that of :func:`step_timeline`, if it is at hand."""
    timeline = timeline or step_timeline(plan)
    stage = fullest_stage(plan)
    if plan.pipeline is None:
        return _of_one_stage(plan, timeline)
    levels = timeline.memory[stage]
    peak = plan.pipeline.peaks[stage] if plan.pipeline.peaks else plan.predicted.peak_bytes
    chunks = plan.pipeline.schedule.held[stage]
    resting = sum(plan.pipeline.chunk_figures[chunk].resting for chunk in chunks)
    over = max(0.0, peak - max((held for _, held in levels), default=0.0))
    return MemoryOverStep(stage, timeline.seconds, levels, resting, over, peak)


def _of_one_stage(plan: PlanRecord, timeline: Timeline) -> MemoryOverStep:
    """A step without stages: activations from when forward computes them until backward has read them."""
    resting = sum(holding.bytes for holding in plan.holdings if holding.kind != "activation")
    ended, read = _times(plan, timeline)
    changes = [(0.0, float(resting))]
    for holding in plan.holdings:
        if holding.kind == "activation":
            made = ended.get(plan.nodes[holding.name].operands[0], 0.0) if plan.nodes[holding.name].operands else 0.0
            changes += [(made, float(holding.bytes)), (max(made, read.get(holding.name, made)), -float(holding.bytes))]
    changes.sort(key=lambda change: change[0])
    held = accumulate(change for _, change in changes)
    levels = dict(zip((time for time, _ in changes), held, strict=True))
    return MemoryOverStep(
        0, timeline.seconds, tuple(levels.items()), resting, plan.predicted.temporary_bytes, plan.predicted.peak_bytes
    )


def _times(plan: PlanRecord, timeline: Timeline) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """When each node has been computed, and when each has been read for the last time. A node that takes no time has
    been computed when the node before it has."""
    ends = {span.name.removeprefix(_COMPUTE): span.end for span in timeline.spans if span.name.startswith(_COMPUTE)}
    ended: dict[str, float] = {}
    read: dict[str, float] = {}
    latest = 0.0
    for name, node in plan.nodes.items():
        latest = ended[name] = ends.get(name, latest)
        for operand in node.operands:
            read[operand] = max(read.get(operand, 0.0), latest)
    return ended, read
