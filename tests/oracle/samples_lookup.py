"""Real calls of lookups: embeddings, gathers, scatters and their like; positions repeat, and hit every
shard."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats, integers, permutations


def _embeddings(rows: int, width: int, *shape: int) -> list[Sample]:
    weight, indices, grad = floats(rows, width), integers(rows, *shape), floats(*shape, width)
    backward = "aten.embedding_dense_backward.default"
    padding = int(indices.flatten()[0])
    return [
        Sample("aten.embedding.default", (weight, indices)),
        Sample("aten.embedding.default", (weight, indices.int(), padding)),
        Sample(backward, (grad, indices, rows, -1, False)),
        Sample(backward, (grad, indices, rows, padding, False)),
        Sample(backward, (grad, indices, rows, padding, True)),
    ]


def _gathers(x: torch.Tensor, dim: int, index: torch.Tensor) -> list[Sample]:
    whole = torch.arange(x.numel()).reshape(x.shape)
    return [
        Sample("aten.gather.default", (x, dim, index)),
        Sample("aten.gather.default", (whole, dim, index)),
        Sample("aten.gather.default", (x > 0, dim, index)),
    ]


def _scatters(x: torch.Tensor, dim: int, index: torch.Tensor) -> list[Sample]:
    """``index`` has no repeats along ``dim``."""
    source, larger = floats(*index.shape), floats(*(size + 1 for size in index.shape))
    return [
        Sample("aten.scatter.value", (x, dim, index, -1.0)),
        Sample("aten.scatter.value", (torch.zeros(x.shape, dtype=torch.int64), dim, index, 3)),
        Sample("aten.scatter.value", (x > 0, dim, index, True)),
        Sample("aten.scatter.src", (x, dim, index, source)),
        Sample("aten.scatter.src", (x, dim, index, larger)),
        Sample("aten.scatter.value_reduce", (x, dim, index, 2.0), {"reduce": "add"}),
    ]


def _scatter_adds(x: torch.Tensor, dim: int, index: torch.Tensor) -> list[Sample]:
    source, larger = floats(*index.shape), floats(*(size + 1 for size in index.shape))
    reduce = "aten.scatter_reduce.two"
    return [
        Sample("aten.scatter_add.default", (x, dim, index, source)),
        Sample("aten.scatter_add.default", (x, dim, index, larger)),
        Sample(reduce, (x, dim, index, source, "sum")),
        Sample(reduce, (x, dim, index, source, "sum"), {"include_self": False}),
        Sample(reduce, (x, dim, index, source, "amax")),
    ]


def _selections(x: torch.Tensor, dim: int, count: int) -> list[Sample]:
    index = integers(x.shape[dim], count)
    shape = [count if d == dim % x.dim() else size for d, size in enumerate(x.shape)]
    return [
        Sample("aten.index_select.default", (x, dim, index)),
        Sample("aten.index_select.default", (x > 0, dim, index)),
        Sample("aten.index_add.default", (x, dim, index, floats(*shape))),
        Sample("aten.index_add.default", (x, dim, index, floats(*shape)), {"alpha": 0.5}),
    ]


SAMPLES = [
    *_embeddings(12, 24, 12, 4),
    *_embeddings(11, 7, 5),
    *_embeddings(257, 5, 3, 7),
    # One class per row, as in cross-entropy.
    *_gathers(floats(12, 24), 1, integers(24, 12, 1)),
    *_gathers(floats(7, 11), -1, integers(11, 7, 1)),
    *_gathers(floats(7, 4, 5), 0, integers(7, 12, 4, 5)),
    *_gathers(floats(12, 6), 1, integers(6, 5, 6)),
    *_scatters(floats(12, 24), 1, permutations(24, 12, 1)),
    *_scatters(floats(7, 11), -1, permutations(11, 7, 1)),
    *_scatters(floats(5, 12, 3), 1, permutations(12, 5, 3, 7).transpose(1, 2).contiguous()),
    *_scatters(floats(6, 11), 1, permutations(11, 4, 5)),
    *_scatter_adds(floats(12, 24), 1, integers(24, 12, 12)),
    *_scatter_adds(floats(7, 11), -1, integers(11, 7, 5)),
    *_scatter_adds(floats(11, 4), 0, integers(11, 7, 4)),
    *_scatter_adds(floats(6, 11), 1, integers(11, 4, 5)),
    *_selections(floats(12, 24), 0, 12),
    *_selections(floats(5, 11, 3), -2, 7),
]
