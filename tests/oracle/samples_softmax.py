"""Real calls of the softmax family."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats


def _softmax(dim: int, *shape: int) -> list[Sample]:
    x, grad = floats(*shape), floats(*shape)
    return [
        Sample("aten._softmax.default", (x, dim, False)),
        Sample("aten._log_softmax.default", (x, dim, False)),
        Sample("aten._safe_softmax.default", (x, dim)),
        Sample("aten._softmax_backward_data.default", (grad, x.softmax(dim), dim, torch.float32)),
        Sample("aten._log_softmax_backward_data.default", (grad, x.log_softmax(dim), dim, torch.float32)),
        Sample("aten.logsumexp.default", (x, [dim])),
        Sample("aten.logsumexp.default", (x, [dim], True)),
    ]


SAMPLES = [
    *_softmax(-1, 12, 6),
    *_softmax(1, 7, 4, 5),
    *_softmax(0, 3, 12),
    Sample("aten.logsumexp.default", (floats(5, 7, 12), [0, 2])),
    Sample("aten.logsumexp.default", (floats(12, 5, 8), [-2, 0], True)),
]
