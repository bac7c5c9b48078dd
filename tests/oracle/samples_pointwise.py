"""Samples of every elementwise operation, made from its schema, and of the cases a schema does not show."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from autopar.passes.rules.pointwise import POINTWISE

from .harness import Sample, find_op

# 12 divides evenly on 2, 3 and 4 devices, 7 on none.
SHAPE = (12, 7)
BROADCAST = ((12, 7), (7,), (12, 1), ())
BOOLEAN_NAMES = ("condition", "mask")


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random, away from the poles and ends of most functions."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(1, 5, shape, dtype=dtype)
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).to(dtype)


def _argument(argument: Any, shape: tuple[int, ...], dtype: torch.dtype, fill: bool) -> Any:
    kind = str(argument.type)
    if "Tensor" in kind:
        return tensor(shape, torch.bool if argument.name in BOOLEAN_NAMES else dtype)
    if argument.default_value is not None:
        return argument.default_value
    if kind.startswith("Optional") and not fill:
        return None
    integral = not dtype.is_floating_point and not dtype.is_complex
    numbers = {"int": 2, "bool": False, "number": 2 if integral else 0.5, "float": 0.5}
    return next((value for name, value in numbers.items() if name in kind), None)


def _sample(op: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, fill: bool) -> Sample:
    """A call of ``op`` whose tensors have ``shapes`` in turn."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    turn = 0
    for argument in find_op(op)._schema.arguments:  # type: ignore[attr-defined]
        value = _argument(argument, shapes[turn % len(shapes)], dtype, fill)
        turn += isinstance(value, torch.Tensor)
        if argument.kwarg_only:
            if value is not None and argument.name not in ("layout", "device", "memory_format"):
                kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(op, tuple(args), kwargs)


def _runs(sample: Sample) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            find_op(sample.op)(*sample.args, **sample.kwargs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return False
    return True


def _candidates(op: str, shapes: tuple[tuple[int, ...], ...]) -> Iterator[Sample]:
    dtypes = (torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32)
    for fill, dtype in product((False, True), dtypes):
        sample = _sample(op, shapes, dtype, fill)
        if _runs(sample):
            yield sample


def _generated(op: str) -> Iterator[Sample]:
    """The first call that runs, for equal shapes and for shapes that broadcast."""
    for shapes in ((SHAPE,), BROADCAST):
        yield from list(_candidates(op, shapes))[:1]


def _special() -> Iterator[Sample]:
    x, y, small = (
        tensor((4, 12), torch.float64),
        tensor((4, 12), torch.float64),
        tensor((7, 12), torch.float32),
    )
    whole = tensor((7, 12), torch.int64)
    yield Sample("aten.mul.Tensor", (x, x))
    yield Sample("aten.add.Tensor", (x, y), {"alpha": 3})
    yield Sample("aten.sub.Tensor", (x, x), {"alpha": 2})
    yield Sample("aten.mul.Tensor", (x, 2.5))
    yield Sample("aten.add.Tensor", (x, 2.5))
    yield Sample("aten.div.Tensor", (x, tensor((), torch.float64)))
    yield Sample("aten.div.Tensor", (whole, 4))
    yield Sample("aten.add.Tensor", (whole, whole))
    yield Sample("aten.mul.Tensor", (whole, tensor((12,), torch.float64)))
    yield Sample("aten.div.Tensor_mode", (x, y), {"rounding_mode": "floor"})
    yield Sample("aten.masked_fill.Scalar", (x, x > 0.5, 0))
    yield Sample("aten.masked_fill.Scalar", (x, x > 0.5, float("-inf")))
    yield Sample("aten.masked_fill.Tensor", (x, tensor((12,), torch.bool), tensor((), torch.float64)))
    yield Sample("aten.where.self", (tensor((12,), torch.bool), x, tensor((), torch.float64)))
    yield Sample("aten.where.self", (tensor((3, 1, 12), torch.bool), x, y))
    yield Sample("aten._to_copy.default", (small,), {"dtype": torch.float64})
    yield Sample("aten._to_copy.default", (small,), {"dtype": torch.int64})
    yield Sample("aten._to_copy.default", (whole,), {"dtype": torch.float32})
    yield Sample("aten._to_copy.default", (tensor((12,), torch.bool),), {"dtype": torch.float32})
    yield Sample("aten.clone.default", (tensor((4, 3, 12, 7), torch.float64),), {"memory_format": torch.channels_last})
    yield Sample("aten.copy.default", (x, tensor((12,), torch.float32)))
    yield Sample("aten.add.Tensor", (tensor((1, 12), torch.float64), tensor((7, 1), torch.float64)))
    yield Sample("aten.add.Tensor", (tensor((0, 12), torch.float64), tensor((12,), torch.float64)))
    yield Sample("aten.clamp.default", (x, 0.2, 0.7))
    yield Sample("aten.div.Scalar_mode", (x, 0.3), {"rounding_mode": "trunc"})
    yield Sample("aten.fill.Tensor", (x, tensor((), torch.float64)))
    yield Sample("aten.gelu_backward.default", (x, y), {"approximate": "tanh"})


SAMPLES = [*(sample for op in POINTWISE for sample in _generated(op)), *_special()]
