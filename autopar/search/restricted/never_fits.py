"""What no plan can do without: the bytes that rest on the devices throughout a step, however it is divided. If they are
too many, only the reason is searched, and what would fit."""

from __future__ import annotations

import math

from autopar.offload import allowed
from autopar.optimizers import ELEMENTWISE, optimizer_bytes
from autopar.planner.memory_limit import HOST_WEIGHTS
from autopar.planner.request import PlanRequest, memory_limit_of


def least_at_rest(request: PlanRequest) -> int:
    """The fewest bytes of weights, gradients and optimizer state that the fullest device can hold: all devices together
    hold each at least once at the end of a step, the fullest no less than their average. State and weights that may
    rest in host memory or on a disk do not count."""
    graph, options, device = request.graph, request.options, request.cluster.device
    away = {kind for kind, tier in allowed(options.offload) if (device.has_host if tier == "host" else device.has_nvme)}
    has_weights = "weights" not in away or request.cluster.backend not in HOST_WEIGHTS
    has_state = "optimizer" not in away or options.optimizer not in ELEMENTWISE
    total = 0
    for node in graph.placeholders("param"):
        count, is_trained = int(node.stored.bytes), node.target in graph.gradients
        total += count * (has_weights + is_trained)
        total += int(optimizer_bytes(options.optimizer, node.stored)) if is_trained and has_state else 0
    return math.ceil(total / math.prod(request.mesh))


def never_fits(request: PlanRequest) -> bool:
    """Whether it is proven that no plan fits, with any mesh, stages and microbatches. Devices of several kinds may have
    different limits, of which nothing is proven."""
    return not request.cluster.groups and least_at_rest(request) > memory_limit_of(request)
