"""A piece of work like a training step, by which calibration learns how much slower operations are in a step than one
by one: operands are in no cache, results are new memory, and of processes that share cores the last one counts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.cost.compute import compute_seconds

from .cluster import Cluster

LAYERS, ROWS, WIDTH, WIDER = 8, 256, 256, 1024


def step_like() -> Callable[[], object]:
    """Forward and backward of :data:`LAYERS` pairs of products with elementwise operations between them."""
    weights = [(torch.ones(WIDTH, WIDER), torch.ones(WIDER, WIDTH)) for _ in range(LAYERS)]
    start = torch.full((ROWS, WIDTH), 1e-9)

    def work() -> list[torch.Tensor]:
        saved, x = [], start
        for up, down in weights:
            wide = x @ up
            twice = wide + wide
            square = twice * wide
            saved.append((x, wide, square))
            x = x + square @ down
        gradients = []
        for (up, down), (given, wide, square) in zip(reversed(weights), reversed(saved), strict=True):
            gradients.append(square.t() @ x)
            inner = (x @ down.t()) * wide
            inner = inner + wide
            gradients.append(given.t() @ inner)
            x = x + inner @ up.t()
        return gradients

    return work


def step_like_seconds(cluster: Cluster) -> float:
    """What :func:`step_like` is priced at, operation by operation."""
    wide, narrow = 4 * ROWS * WIDER, 4 * ROWS * WIDTH
    shapes = 2 * [(ROWS, WIDER, WIDTH), (ROWS, WIDTH, WIDER)] + [(WIDER, WIDTH, ROWS), (WIDTH, WIDER, ROWS)]
    products = sum(
        compute_seconds(cluster, 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n), torch.float32, (m, n, k))
        for m, n, k in shapes
    )
    moved = 4 * [3 * wide] + 2 * [3 * narrow]
    return LAYERS * (products + sum(compute_seconds(cluster, n / 12.0, float(n), torch.float32) for n in moved))
