"""Samples of reductions, scans and sorts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .harness import Sample


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _sums() -> Iterator[Sample]:
    integers, booleans = torch.randint(9, (7, 12)), torch.rand(7, 12) < 0.5
    for tensor in (_x(7, 12), _x(12, 4, 7), integers, booleans, _x(1, 12)):
        yield Sample("aten.sum.default", (tensor,))
        for dims, keepdim in (([0], False), ([-1], True), ([0, 1], False), ([], False), (None, True)):
            yield Sample("aten.sum.dim_IntList", (tensor, dims, keepdim))
        yield Sample("aten.count_nonzero.dim_IntList", (tensor, [1]))
    yield Sample("aten.sum.dim_IntList", (integers, [0]), {"dtype": torch.float64})
    yield Sample("aten.sum.dim_IntList", (_x(12).float(), [0]), {"dtype": torch.float64})
    yield Sample("aten.sum.default", (integers.to(torch.int32),))
    yield Sample("aten.sum.dim_IntList", (_x(12), [0]))
    yield Sample("aten.nansum.default", (torch.where(_x(7, 12) > 0, _x(7, 12), torch.nan), [0]))
    yield Sample("aten.nansum.default", (_x(7, 12),))


def _over_dims() -> Iterator[Sample]:
    x, integers, booleans = _x(4, 7, 12), torch.randint(9, (7, 12)), torch.rand(7, 12) < 0.5
    for name in ("amax.default", "amin.default", "mean.dim", "var.dim", "std.dim"):
        for dims, keepdim in (([0], False), ([-1, 0], True)):
            extra = (True, keepdim) if name in ("var.dim", "std.dim") else (keepdim,)
            yield Sample(f"aten.{name}", (x, dims, *extra))
    for name in ("amax.default", "amin.default", "max.default", "min.default"):
        yield Sample(f"aten.{name}", (integers,))
        yield Sample(f"aten.{name}", (x,))
    yield Sample("aten.amax.default", (booleans, [1]))
    for name in ("var", "std", "var_mean", "std_mean"):
        yield Sample(f"aten.{name}.correction", (x, [1]), {"correction": 0, "keepdim": True})
        yield Sample(f"aten.{name}.correction", (x, [0, 1]), {"correction": 1})
        yield Sample(f"aten.{name}.correction", (x,))
    yield Sample("aten.mean.default", (x,))
    for name in (
        "prod.dim_int",
        "max.dim",
        "min.dim",
        "median.dim",
        "nanmedian.dim",
        "argmax.default",
        "argmin.default",
    ):
        yield Sample(f"aten.{name}", (x, 1))
        yield Sample(f"aten.{name}", (x, -1, True))
    yield Sample("aten.argmax.default", (x,))
    for name in ("any", "all"):
        yield Sample(f"aten.{name}.dim", (booleans, 1))
        yield Sample(f"aten.{name}.dims", (booleans, [0], True))
    yield Sample("aten.aminmax.default", (x,), {"dim": 1})
    yield Sample("aten.aminmax.default", (x,), {"dim": 0, "keepdim": True})
    yield Sample("aten.aminmax.default", (x,))
    yield Sample("aten.linalg_vector_norm.default", (x, 2, [1], True))
    yield Sample("aten.linalg_vector_norm.default", (x, 1))
    yield Sample("aten.norm.ScalarOpt_dim", (x, 2, [1]))
    yield Sample("aten.norm.ScalarOpt_dim_dtype", (x.float(), 2, [1], True), {"dtype": torch.float64})
    yield Sample("aten.mode.default", (integers,))
    yield Sample("aten.mode.default", (integers, 0, True))
    yield Sample("aten.kthvalue.default", (x, 2))
    yield Sample("aten.kthvalue.default", (x, 2, 1, True))


def _ordered() -> Iterator[Sample]:
    x = _x(4, 7, 12)
    for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        yield Sample(f"aten.{name}.default", (x, 1))
        yield Sample(f"aten.{name}.default", (x, -1))
    yield Sample("aten.cumsum.default", (torch.randint(9, (7, 12)), 1))
    yield Sample("aten.cumsum.default", (torch.rand(7, 12) < 0.5, 1))
    for name in ("sort", "argsort"):
        yield Sample(f"aten.{name}.default", (x,))
        yield Sample(f"aten.{name}.default", (x, 0, True))
        yield Sample(f"aten.{name}.stable", (x,), {"stable": True})
        yield Sample(f"aten.{name}.stable", (x,), {"stable": False, "dim": 1})
    yield Sample("aten.topk.default", (x, 3))
    yield Sample("aten.topk.default", (x, 3, 1, False))
    yield Sample("aten.flip.default", (x, [0, -1]))
    yield Sample("aten.roll.default", (x, [2, 1], [0, 1]))
    yield Sample("aten.roll.default", (x, [5]))


SAMPLES = [*_sums(), *_over_dims(), *_ordered()]
