"""Real calls of advanced indexing: adjacent and split blocks, broadcast and negative positions, masks."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats, integers, masks, permutations

Indices = list[torch.Tensor | None]


def _reads(x: torch.Tensor, indices: Indices) -> list[Sample]:
    return [
        Sample("aten.index.Tensor", (x, indices)),
        Sample("aten.index.Tensor", (x > 0, indices)),
    ]


def _writes(x: torch.Tensor, indices: Indices) -> list[Sample]:
    """Repeated positions all get the same number unless they add up."""
    shape = torch.ops.aten.index.Tensor(x, indices).shape
    values = floats(*shape)
    return [
        Sample("aten.index_put.default", (x, indices, values, True)),
        Sample("aten.index_put.default", (x, indices, floats(*shape[-1:]), True)),
        Sample("aten.index_put.default", (x, indices, torch.tensor(0.5), True)),
        Sample("aten.index_put.default", (x, indices, torch.tensor(0.5))),
    ]


def _fills(x: torch.Tensor, mask: torch.Tensor) -> list[Sample]:
    return [
        Sample("aten.index_put.default", (x, [mask], torch.tensor(-1.0))),
        Sample("aten.index_put.default", (x, [mask], torch.tensor([2.0]))),
    ]


def _both(x: torch.Tensor, indices: Indices) -> list[Sample]:
    return [*_reads(x, indices), *_writes(x, indices)]


SAMPLES = [
    *_both(floats(12, 24), [integers(12, 24)]),
    *_both(floats(11, 5), [integers(11, 7, low=-11)]),
    *_both(floats(11, 7, 3), [None, integers(7, 4, 5)]),
    *_both(floats(5, 12, 7), [integers(5, 12, 1, low=-5), integers(12, 1, 7)]),
    *_both(floats(5, 12, 7), [integers(5, 4), None, integers(7, 4)]),
    *_both(floats(7, 11, 5, 6), [None, integers(11, 8), integers(5, 8)]),
    *_both(floats(7, 5, 11, 6), [None, integers(5, 3, 1), None, integers(6, 8)]),
    Sample("aten.index_put.default", (floats(12, 5), [permutations(12, 8)], floats(8, 5))),
    Sample("aten.index_put.default", (floats(5, 11), [None, permutations(11, 7)], floats(5, 7))),
    Sample("aten._unsafe_index.Tensor", (floats(4, 7, 6, 5), [None, None, integers(6, 8, 1), integers(5, 9)])),
    Sample("aten._unsafe_index_put.default", (floats(5, 12), [None, integers(12, 7)], floats(5, 7), True)),
    *_fills(floats(12, 7), masks(12)),
    *_fills(floats(7, 12), masks(7, 12)),
]
