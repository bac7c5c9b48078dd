"""The timeline of a planned step: when each pipeline rank does what, according to the plan's prices."""

from __future__ import annotations

import math
from collections import Counter

from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices, SharedProcessors
from autopar.cost.pipeline.simulate import simulate
from autopar.ir.plan_record import ONCE_A_STEP, PlanRecord
from autopar.ir.planned_pipeline import PlannedPipeline
from autopar.schedule.timeline import Lane, Span, Timeline

# A step without stages is priced as a sum. The timeline shows the lines that run once a step in this order.
_ORDER = ("weight", "compute", "reshard", "gradient", "optimizer", "offload", "refresh", "swap")
_COMPUTES = ("compute", "optimizer")


def step_timeline(plan: PlanRecord) -> Timeline:
    """The timeline of a step of ``plan``: when each pipeline rank does what, simulated from the prices in the plan.
    Without stages, the priced items one after the other. ``save_chrome_trace(path)`` of the result writes it for
    ``chrome://tracing``.
    """
    if plan.pipeline is None:
        return _one_after_the_other(plan)
    return simulate(plan.pipeline.schedule, pipeline_prices(plan.pipeline)).timeline


def pipeline_prices(pipeline: PlannedPipeline) -> PipelinePrices:
    """The prices with which the schedule was simulated."""
    chunks = tuple(
        ChunkPrice(
            c.forward,
            c.input_gradient,
            c.weight_gradient,
            backward=c.input_gradient + c.weight_gradient - c.joined,
            reduce=c.reduce,
            overlap_weight_gradient=c.overlap_half,
            overlap_backward=c.overlap_whole,
            unawaited=c.unawaited,
            until_weight_gradient=c.saved,
            static=c.resting,
        )
        for c in pipeline.chunk_figures
    )
    edges = {
        (link.source, link.target): EdgePrice(link.forward_bytes, link.bandwidth, link.latency, link.backward_bytes)
        for link in pipeline.link_figures
    }
    return PipelinePrices(
        chunks, edges, step=pipeline.update_seconds, hides=pipeline.hides, shared=_shared_processors(pipeline)
    )


def _shared_processors(pipeline: PlannedPipeline) -> SharedProcessors | None:
    if not pipeline.hosts:
        return None
    devices = tuple(map(math.prod, pipeline.meshes))
    together = Counter[int]()
    for host, count in zip(pipeline.hosts, devices, strict=False):
        together[host] += count
    # Plans of unequal stages once had speeds by the number of stages at work, which are too few for their devices.
    per_device = len(pipeline.speeds) >= max(together.values(), default=0)
    return SharedProcessors(pipeline.hosts, pipeline.speeds, devices if per_device else ())


def _one_after_the_other(plan: PlanRecord) -> Timeline:
    def when(position: int) -> tuple[bool, int, int]:
        line = plan.lines[position]
        once = line.kind in ONCE_A_STEP
        return line.phase == "backward" or once, _ORDER.index(line.kind) if once else 0, position

    exposed = _exposed(plan)
    spans: list[Span] = []
    time, link_free = 0.0, -1.0
    for position in sorted(range(len(plan.lines)), key=when):
        line = plan.lines[position]
        if line.kind == "hidden" or not line.seconds:
            continue
        lane: Lane = "compute" if line.kind in _COMPUTES else "communication"
        share = exposed.get((line.kind, line.phase), 1.0)
        if line.kind == "gradient" and link_free < 0:
            # A step waits for the last gradients only; the others are sent while backward runs.
            link_free = time - (1.0 - share) * plan.seconds_of("gradient")
        end = time + share * line.seconds
        if line.kind == "gradient":
            link_free = end = link_free + line.seconds
        spans.append(Span(0, f"{line.kind} {line.name}", line.kind, end - line.seconds, end, lane))
        time += share * line.seconds
    return Timeline(1, tuple(spans), (), "step")


def _exposed(plan: PlanRecord) -> dict[tuple[str, str], float]:
    """The share of the messages that the step waits for, by kind and phase, where messages overlap computation."""
    hidden: dict[str, float] = {}
    for line in plan.lines:
        if line.kind == "hidden":
            hidden[line.phase] = hidden.get(line.phase, 0.0) + line.seconds
    shares: dict[tuple[str, str], float] = {}
    for phase, seconds in hidden.items():
        messages = [line for line in plan.lines if line.kind == "weight" and line.phase == phase]
        if phase == "backward":
            messages += [line for line in plan.lines if line.kind == "gradient"]
        share = 1.0 + seconds / sum(line.seconds for line in messages)
        shares.update({(line.kind, line.phase): share for line in messages})
    return shares
