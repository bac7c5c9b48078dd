"""Real calls of the matrix products."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats


def _with_sizes(m: int, k: int, n: int, b: int) -> list[Sample]:
    left, right, row, column = floats(m, k), floats(k, n), floats(n), floats(m, 1)
    batched = floats(b, m, k), floats(b, k, n)
    return [
        Sample("aten.mm.default", (left, right)),
        Sample("aten.bmm.default", batched),
        Sample("aten.mv.default", (left, floats(k))),
        Sample("aten.dot.default", (floats(k), floats(k))),
        Sample("aten.vdot.default", (floats(k), floats(k))),
        Sample("aten.addmm.default", (row, left, right)),
        Sample("aten.addmm.default", (column, left, right), {"beta": 0.5, "alpha": 2.0}),
        Sample("aten.addmm.default", (floats(m, n), left, right)),
        Sample("aten.addmm.default", (torch.tensor(0.5), left, right)),
        Sample("aten.baddbmm.default", (floats(b, m, n), *batched)),
        Sample("aten.baddbmm.default", (floats(1, n), *batched)),
        Sample("aten.addmv.default", (floats(m), left, floats(k))),
    ]


SAMPLES = [*_with_sizes(12, 24, 12, 12), *_with_sizes(7, 11, 5, 5), *_with_sizes(4, 8, 1, 4)]

NEEDS_CUDA = {
    "aten.mm.dtype": "the accumulating type can be chosen on CUDA only",
    "aten.bmm.dtype": "the accumulating type can be chosen on CUDA only",
    "aten.addmm.dtype": "the accumulating type can be chosen on CUDA only",
    "aten.baddbmm.dtype": "the accumulating type can be chosen on CUDA only",
}
