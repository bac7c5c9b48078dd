"""Real calls of convolutions: 1 to 3 spatial dims, grouped, depthwise, dilated, transposed, with and without
bias."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .harness import Sample
from .random_tensors import floats


def _attributes(spatial: int, transposed: bool, groups: int, dilation: int = 1) -> tuple[Any, ...]:
    ones = [1] * spatial
    return (
        [2] * spatial,
        ones,
        [dilation] * spatial,
        transposed,
        ones if transposed else [0] * spatial,
        groups,
    )


def _samples(n: int, cin: int, cout: int, groups: int, spatial: int, transposed: bool) -> list[Sample]:
    x = floats(n, cin, *[6] * spatial)
    channels = (cin, cout // groups) if transposed else (cout, cin // groups)
    weight, bias = floats(*channels, *[3] * spatial), floats(cout)
    attributes = _attributes(spatial, transposed, groups, dilation=2 if spatial == 1 else 1)
    grad = floats(*torch.ops.aten.convolution.default(x, weight, bias, *attributes).shape)
    forward, backward = "aten.convolution.default", "aten.convolution_backward.default"
    return [
        Sample(forward, (x, weight, bias, *attributes)),
        Sample(forward, (x, weight, None, *attributes)),
        Sample(backward, (grad, x, weight, [cout], *attributes, [True, True, True])),
        Sample(backward, (grad, x, weight, None, *attributes, [False, True, False])),
        Sample(backward, (grad, x, weight, None, *attributes, [True, False, False])),
    ]


_SIZES = [
    (12, 12, 24, 1),  # everything divides
    (5, 7, 11, 1),  # nothing does
    (4, 12, 24, 12),  # depthwise with two results per channel
    (4, 7, 7, 7),  # depthwise, uneven
    (5, 24, 12, 12),  # whole groups, two channels each
    (4, 12, 18, 6),  # groups that 4 devices cannot cut
]

SAMPLES = [
    sample
    for (n, cin, cout, groups), spatial, transposed in itertools.product(_SIZES, (1, 2), (False, True))
    for sample in _samples(n, cin, cout, groups, spatial, transposed)
] + [sample for transposed in (False, True) for sample in _samples(4, 4, 6, 2, 3, transposed)]
