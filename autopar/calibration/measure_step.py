"""Work like a training step, with which calibration measures how much slower operations and collectives are in a step
than in isolation: in a step, neither operands nor code are in a cache, results are new memory, and of processes that
share cores, or have cores of which one is slower today, the last counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.cluster.description import Cluster
from autopar.cost.collective.collective import collective_seconds
from autopar.cost.compute.roofline import compute_seconds

# Chosen: feed-forward layers of a small transformer, whose 16 MiB of weights no core's cache holds.
LAYERS, ROWS, WIDTH, WIDER = 8, 256, 256, 1024
# Parameters of layers, so many that they, their gradients and their state are larger than caches, as a model's are.
# Chosen: 32 MiB in all.
UPDATED = 32 * ((256, 1024), (1024,))
# Bytes that AdamW at least reads (value, gradient and two states) and writes (value and two states).
UPDATED_BYTES = 7 * sum(4 * math.prod(shape) for shape in UPDATED)
# Tiny operations after each product of forward while the launch time is measured.
# Chosen: enough for an average, few enough not to disturb the caches of the products.
TINY = 4


@dataclass(frozen=True)
class StepSample:
    """What one process measured of work like a step, in seconds from when all processes begin until the last is done.
    ``step``: of the work itself; ``exchange``: of an exchange of its gradients afterwards; ``update``: of an AdamW
    update of :data:`UPDATED` after both. ``own_step``, ``own_update``: until this process is done. ``launch``:
    processor time of a tiny operation in the work."""

    step: float
    exchange: float
    update: float
    own_step: float
    own_update: float
    launch: float


def update_like() -> Callable[[], object]:
    """An AdamW update of :data:`UPDATED` with torch's default implementation."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in UPDATED]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(parameters, lr=1e-6).step


def step_like(launches: list[float] | None = None) -> Callable[[], list[torch.Tensor]]:
    """Returns a function that runs forward and backward of :data:`LAYERS` pairs of products, with elementwise
    operations between them, and returns the gradients. It appends to ``launches`` the processor seconds of a tiny
    operation after each product of forward."""
    small, add = torch.ones(4, 16), torch.ops.aten.add.Tensor

    weights = [(torch.ones(WIDTH, WIDER), torch.ones(WIDER, WIDTH)) for _ in range(LAYERS)]
    start = torch.full((ROWS, WIDTH), 1e-9)

    def launch() -> None:
        if launches is not None:
            start = time.thread_time()
            for _ in range(TINY):
                add(small, small)
            launches.append((time.thread_time() - start) / TINY)

    def work() -> list[torch.Tensor]:
        saved, x = [], start
        for up, down in weights:
            wide = x @ up
            launch()
            twice = wide + wide
            square = twice * wide
            saved.append((x, wide, square))
            x = x + square @ down
            launch()
        gradients = []
        for (up, down), (x_before, wide, square) in zip(reversed(weights), reversed(saved), strict=True):
            gradients.append(square.t() @ x)
            inner = (x @ down.t()) * wide
            inner = inner + wide
            gradients.append(x_before.t() @ inner)
            x = x + inner @ up.t()
        return gradients

    return work


def step_like_seconds(cluster: Cluster) -> float:
    """The price of :func:`step_like`, operation by operation."""
    wide, narrow = 4 * ROWS * WIDER, 4 * ROWS * WIDTH
    shapes = 2 * [(ROWS, WIDER, WIDTH), (ROWS, WIDTH, WIDER)] + [(WIDER, WIDTH, ROWS), (WIDTH, WIDER, ROWS)]
    products = sum(
        compute_seconds(cluster, 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n), torch.float32, (m, n, k))
        for m, n, k in shapes
    )
    moved = 4 * [3 * wide] + 2 * [3 * narrow]
    return LAYERS * (products + sum(compute_seconds(cluster, n / 12.0, float(n), torch.float32) for n in moved))


def exchange_seconds(cluster: Cluster, processes: int) -> tuple[float, float]:
    """The price of a reduce-scatter and an all-gather of the gradients of :func:`step_like`, each in one bucket:
    seconds in all, and the part of them for bytes on the wire."""
    nbytes = 2 * LAYERS * 4 * WIDER * WIDTH
    packing = 4.0 * nbytes / cluster.device.memory_bandwidth

    def both(size: int) -> float:
        kinds = ("reduce_scatter", "all_gather")
        return sum(collective_seconds(cluster, (processes,), kind, (0,), size) for kind in kinds)

    return packing + both(nbytes), both(nbytes) - both(0)
