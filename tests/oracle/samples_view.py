"""Samples of changes of shape."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from .harness import Sample

# Pairs of shapes with factors in every position, sizes that divide nothing, and dims of length 1 and 0.
RESHAPES = (
    ((4, 6, 5), (24, 5)),
    ((24, 5), (4, 6, 5)),
    ((7, 12), (7, 3, 4)),
    ((7, 36), (7, 3, 12)),
    ((7, 3, 12), (7, 36)),
    ((7, 3, 4, 3), (7, 36)),
    ((2, 12, 3, 2), (24, 6)),
    ((12, 7), (12, 7)),
    ((12, 7), (84,)),
    ((84,), (7, 12)),
    ((4, 6), (6, 4)),
    ((4, 6), (3, 8)),
    ((12, 12), (8, 18)),
    ((7, 1, 12), (7, 12)),
    ((7, 12), (1, 7, 1, 12, 1)),
    ((2, 3, 4, 5), (6, 20)),
    ((6, 20), (2, 3, 4, 5)),
    ((2, 12, 6), (4, 6, 3, 2)),
    ((1,), ()),
    ((), (1, 1)),
    ((0, 4), (4, 0)),
    ((13,), (13, 1)),
    ((36,), (2, 3, 3, 2)),
)


def _reshapes() -> Iterator[Sample]:
    for source, target in RESHAPES:
        x = torch.arange(prod(source), dtype=torch.float64).reshape(source)
        yield Sample("aten.reshape.default", (x, target))
        yield Sample("aten.view.default", (x, target))
        yield Sample("aten._unsafe_view.default", (x, target))
        yield Sample("aten.view_copy.default", (x, target))
        yield Sample("aten._reshape_copy.default", (x, target))
    yield Sample("aten.reshape.default", (torch.rand(12, 4, dtype=torch.float64).t(), (48,)))
    yield Sample("aten.reshape.default", (torch.randint(9, (6, 7, 2)), (6, 14)))
    yield Sample("aten.reshape.default", (torch.rand(6, 7, 2) < 0.5, (-1, 2)))
    x = torch.rand(1, 7, 1, 12, dtype=torch.float64)
    yield Sample("aten.squeeze.default", (x,))
    yield Sample("aten.squeeze.default", (torch.rand(3, 4, 2),))
    yield Sample("aten.squeeze.dim", (x, 2))
    yield Sample("aten.squeeze.dim", (x, 1))
    yield Sample("aten.squeeze.dims", (x, [0, -2]))
    yield Sample("aten.unsqueeze.default", (x, -1))
    yield Sample("aten.unsqueeze.default", (x, 2))
    yield Sample("aten.flatten.using_ints", (torch.rand(7, 3, 4, 5), 1, 2))
    yield Sample("aten.unflatten.int", (torch.rand(7, 12), 1, [3, -1]))


def _others() -> Iterator[Sample]:
    x = torch.rand(4, 7, 12, dtype=torch.float64)
    for name in ("permute", "permute_copy"):
        yield Sample(f"aten.{name}.default", (x, [2, 0, 1]))
    yield Sample("aten.permute.default", (x, [-1, 0, -2]))
    yield Sample("aten.transpose.int", (x, -1, 1))
    yield Sample("aten.transpose.int", (torch.rand(12), 0, 0))
    yield Sample("aten.t.default", (x[0],))
    yield Sample("aten.t.default", (x[0, 0],))
    for name in ("expand", "expand_copy"):
        yield Sample(f"aten.{name}.default", (torch.rand(7, 1, dtype=torch.float64), [12, 7, 4]))
        yield Sample(f"aten.{name}.default", (torch.rand(7, 1, 6), [-1, 13, -1]))
    yield Sample("aten.expand.default", (torch.rand(()), [12]))


SAMPLES = [*_reshapes(), *_others()]
