"""Which pipelines are worth solving: layouts of stages, and numbers of microbatches for each.

Where nothing is asked for, a layout is tried only if it could win. The devices together cannot take less than what one
device computes, and a pipeline is taken to idle besides, by a sixth of what 1F1B does. That is what ZB-V leaves with
equal chunks; uneven ones might leave less, so this part of the bound is a heuristic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from autopar.cluster.description import Cluster
from autopar.cost.collective.point_to_point import message_rate
from autopar.ir.graph import Graph
from autopar.ir.node import VIEWS
from autopar.passes.annotate.annotate import annotate
from autopar.placement.prices import Prices
from autopar.planner.request import PlanRequest, axes_are_fixed

from .stage_meshes import StageLayout, layouts, microbatch_counts

# How many placement programs may be solved to see whether stages pay, times the operations of the graph: at least one.
# Chosen: one program for a graph of 2000 operations, whose solve takes longest; four for one of 500.
EFFORT = 2000


def attempts(request: PlanRequest, graph: Graph, best: float) -> Iterator[tuple[StageLayout, tuple[int, ...]]]:
    """Layouts with the numbers of microbatches to try. ``graph``: the step to be cut; ``best``: seconds of the best
    plan without stages, infinite if there is none."""
    options, devices = request.options, math.prod(request.mesh)
    one_stage = StageLayout(1, request.mesh, tuple(range(len(request.mesh))))
    if options.stages in (None, 1) and options.microbatches is not None and options.microbatches > 1:
        yield one_stage, (options.microbatches,)
    if options.stages == 1 and options.microbatches is None and math.isinf(best):
        yield one_stage, tuple(n for n in microbatch_counts(request.batch, 1, None) if n > 1)
    if options.stages == 1 or (options.stages is None and (devices == 1 or keeps_axes(request))):
        return
    every = [
        (layout, microbatch_counts(request.batch, layout.stages, options.microbatches))
        for layout in layouts(request.mesh, options.stages)
    ]
    if options.stages is not None or options.schedule is not None:
        yield from every
    else:
        yield from _promising(request, graph, best, every)


def keeps_axes(request: PlanRequest) -> bool:
    """Whether what is fixed speaks of the axes of the mesh, so that they are not given to stages unasked."""
    options = request.options
    fixed = options.zero is not None or axes_are_fixed(request)
    return fixed and options.schedule is None and options.microbatches is None


def _promising(
    request: PlanRequest, graph: Graph, best: float, every: list[tuple[StageLayout, tuple[int, ...]]]
) -> Iterator[tuple[StageLayout, tuple[int, ...]]]:
    """Of all attempts those that could win, the one with the least bound of each layout first, as many as the effort
    allows."""
    devices = math.prod(request.mesh)
    alone, launches = single_device_seconds(request, graph)
    idle = partial(_idle_share, request.cluster)
    found: list[tuple[float, int, StageLayout, int]] = []
    for layout, counts in every:
        bounds = [
            (alone + (n - 1) * launches) / devices * (1.0 + idle(layout.stages, n)) + _hops(request, layout)
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


def _hops(request: PlanRequest, layout: StageLayout) -> float:
    """Latencies on the way of a microbatch through all stages and back."""
    devices = math.prod(layout.mesh)
    pairs = ((s, s + 1) for s in range(layout.stages - 1))
    return 2.0 * sum(message_rate(request.cluster, s, t, devices)[0] for s, t in pairs)


def single_device_seconds(request: PlanRequest, graph: Graph) -> tuple[float, float]:
    """Seconds of computing a step on one device, and what of it is paid again for each further microbatch: launching.
    However it is divided, the devices take this in sum."""
    alone = annotate(graph, (1,))
    prices = Prices.of(request.cluster, (1,), alone)
    nodes = [node for node in graph.nodes if not node.is_placeholder]
    seconds = sum(
        prices.node(node, tuple(map(graph.type_of, node.operands)), alone.strategies[node.name][0]) for node in nodes
    )
    return seconds, request.cluster.device.launch_seconds * sum(node.op not in VIEWS for node in nodes)
