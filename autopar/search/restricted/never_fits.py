"""What no plan can do without: the bytes that rest on the devices throughout a step. If they are too many however they
are divided, only the reason is searched, and what would fit. How a layout divides them tells which others may fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.offload import allowed
from autopar.optimizers import ELEMENTWISE, optimizer_bytes
from autopar.planner.memory_limit import HOST_WEIGHTS
from autopar.planner.request import PlanRequest, memory_limit_of
from autopar.restriction import Restriction

# What ZeRO shards over the data ranks, by its stage.
_SHARDED: Mapping[int, tuple[str, ...]] = {
    0: (),
    1: ("state",),
    2: ("state", "gradients"),
    3: ("state", "gradients", "weights"),
}


def resting(request: PlanRequest) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state of the whole model at the end of a step. State and weights that
    may rest in host memory or on a disk do not count."""
    graph, options, device = request.graph, request.options, request.cluster.device
    away = {kind for kind, tier in allowed(options.offload) if (device.has_host if tier == "host" else device.has_nvme)}
    has_weights = "weights" not in away or request.cluster.backend not in HOST_WEIGHTS
    has_state = "optimizer" not in away or options.optimizer not in ELEMENTWISE
    found = dict.fromkeys(("weights", "gradients", "state"), 0)
    for node in graph.placeholders("param"):
        count, is_trained = int(node.stored.bytes), node.target in graph.gradients
        found["weights"] += count * has_weights
        found["gradients"] += count * is_trained
        found["state"] += int(optimizer_bytes(options.optimizer, node.stored)) if is_trained and has_state else 0
    return found


def least_at_rest(request: PlanRequest) -> int:
    """The fewest bytes of weights, gradients and optimizer state that the fullest device can hold: all devices together
    hold each at least once at the end of a step, the fullest no less than their average."""
    return math.ceil(sum(resting(request).values()) / math.prod(request.mesh))


def at_rest_in_layout(request: PlanRequest) -> int:
    """About the bytes that rest on a device under the layout of ``request``: matrices are divided among tensor and
    pipeline ranks, experts among theirs, and what ZeRO shards among all. Not proven: weights that no product reads, a
    few, may be divided among data ranks too, and not all weights are of experts."""
    options, devices, own = request.options, math.prod(request.mesh), Restriction.of(request.options.layout)
    stages = own.pipeline or (options.stages if isinstance(options.stages, int) else None)
    given = math.prod(n or 1 for n in (own.tensor, own.data, own.context, stages))
    is_open = own.tensor is None or stages is None
    parts = (own.tensor or 1) * (stages or 1) * (own.expert or 1) * (max(1, devices // given) if is_open else 1)
    sharded = _SHARDED[3 if options.zero is None else options.zero]
    return sum(
        math.ceil(count / (devices if kind in sharded else min(parts, devices)))
        for kind, count in resting(request).items()
    )


def never_fits(request: PlanRequest) -> bool:
    """Whether it is proven that no plan fits, with any mesh, stages and microbatches. Devices of several kinds may have
    different limits, of which nothing is proven."""
    return not request.cluster.groups and least_at_rest(request) > memory_limit_of(request)
