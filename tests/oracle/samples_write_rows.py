"""Real calls that write rows."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats

SAMPLES = [
    Sample(op, (floats(*shape), dim, torch.tensor(places), floats(*rows)))
    for op in ("autopar.write_rows.default", "aten.index_copy.default")
    for shape, dim, places, rows in (
        ((4, 6, 8, 5), 2, [3], (4, 6, 1, 5)),
        ((12, 7, 9, 3), -2, [0, 4, 2], (12, 7, 3, 3)),
        ((6, 5), 0, [1, 5], (2, 5)),
    )
]
