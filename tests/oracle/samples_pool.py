"""Real calls of pooling and resampling."""

from __future__ import annotations

from typing import Any

import torch

from .harness import Sample
from .random_tensors import floats

aten = torch.ops.aten


def _like(x: torch.Tensor) -> torch.Tensor:
    return floats(*x.shape)


def _pools(*batch: int) -> list[Sample]:
    line, plane, space = floats(*batch, 9), floats(*batch, 9, 8), floats(*batch, 5, 6, 4)
    window: tuple[Any, ...] = ([3, 3], [2, 2], [1, 1], False, True, None)
    cube: tuple[Any, ...] = ([2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None)
    means = aten.avg_pool2d.default(plane, *window), aten.avg_pool3d.default(space, *cube)
    small = (
        aten._adaptive_avg_pool2d.default(plane, [2, 3]),
        aten._adaptive_avg_pool3d.default(space, [2, 3, 2]),
    )
    return [
        Sample("aten.avg_pool1d.default", (line, [3], [2])),
        Sample("aten.avg_pool2d.default", (plane, *window)),
        Sample("aten.avg_pool3d.default", (space, *cube)),
        Sample("aten.avg_pool2d_backward.default", (_like(means[0]), plane, *window)),
        Sample("aten.avg_pool3d_backward.default", (_like(means[1]), space, *cube)),
        Sample("aten._adaptive_avg_pool2d.default", (plane, [2, 3])),
        Sample("aten._adaptive_avg_pool3d.default", (space, [2, 3, 2])),
        Sample("aten._adaptive_avg_pool2d_backward.default", (_like(small[0]), plane)),
        Sample("aten._adaptive_avg_pool3d_backward.default", (_like(small[1]), space)),
    ]


def _max_pools(*batch: int) -> list[Sample]:
    plane, space = floats(*batch, 9, 8), floats(*batch, 5, 6, 4)
    window: tuple[Any, ...] = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    cube: tuple[Any, ...] = ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False)
    flat, flat_at = aten.max_pool2d_with_indices.default(plane, *window)
    solid, solid_at = aten.max_pool3d_with_indices.default(space, *cube)
    fit, fit_at = aten.adaptive_max_pool2d.default(plane, [2, 3])
    fit3, fit3_at = aten.adaptive_max_pool3d.default(space, [2, 3, 2])
    return [
        Sample("aten.max_pool2d_with_indices.default", (plane, *window)),
        Sample("aten.max_pool3d_with_indices.default", (space, *cube)),
        Sample("aten.adaptive_max_pool2d.default", (plane, [2, 3])),
        Sample("aten.adaptive_max_pool3d.default", (space, [2, 3, 2])),
        Sample("aten.max_pool2d_with_indices_backward.default", (_like(flat), plane, *window, flat_at)),
        Sample("aten.max_pool3d_with_indices_backward.default", (_like(solid), space, *cube, solid_at)),
        Sample("aten.adaptive_max_pool2d_backward.default", (_like(fit), plane, fit_at)),
        Sample("aten.adaptive_max_pool3d_backward.default", (_like(fit3), space, fit3_at)),
    ]


_RESAMPLINGS = {
    "upsample_nearest1d": (1, False),
    "upsample_nearest2d": (2, False),
    "upsample_nearest3d": (3, False),
    "_upsample_nearest_exact1d": (1, False),
    "_upsample_nearest_exact2d": (2, False),
    "_upsample_nearest_exact3d": (3, False),
    "upsample_linear1d": (1, True),
    "upsample_bilinear2d": (2, True),
    "upsample_bicubic2d": (2, True),
    "upsample_trilinear3d": (3, True),
    "_upsample_bilinear2d_aa": (2, True),
    "_upsample_bicubic2d_aa": (2, True),
}


def _resamplings(*batch: int) -> list[Sample]:
    found: list[Sample] = []
    for name, (spatial, aligns) in _RESAMPLINGS.items():
        x, target = floats(*batch, *range(3, 3 + spatial)), [5 + d for d in range(spatial)]
        corners = (False,) if aligns else ()
        grad = floats(*batch, *target)
        found += [
            Sample(f"aten.{name}.default", (x, target, *corners)),
            Sample(f"aten.{name}.vec", (x, None, *corners, [2.0] * spatial)),
            Sample(f"aten.{name}_backward.default", (grad, target, list(x.shape), *corners)),
        ]
    return found


def _grid_samplers(n: int, c: int) -> list[Sample]:
    plane, space, grid, grid3 = (
        floats(n, c, 4, 5),
        floats(n, c, 3, 4, 5),
        floats(n, 3, 3, 2),
        floats(n, 2, 3, 2, 3),
    )
    flags, mask = (0, 0, False), [True, True]
    return [
        Sample("aten.grid_sampler_2d.default", (plane, grid, *flags)),
        Sample("aten.grid_sampler_3d.default", (space, grid3, *flags)),
        Sample("aten.grid_sampler_2d_backward.default", (floats(n, c, 3, 3), plane, grid, *flags, mask)),
        Sample("aten.grid_sampler_3d_backward.default", (floats(n, c, 2, 3, 2), space, grid3, *flags, mask)),
    ]


SAMPLES = [
    sample
    for n, c in ((12, 4), (5, 7))
    for make in (_pools, _max_pools, _resamplings, _grid_samplers)
    for sample in make(n, c)
] + [*_pools(7), *_max_pools(12)]
