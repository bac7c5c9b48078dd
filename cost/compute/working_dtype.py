"""The dtype in which a step computes, by which its MFU counts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch

from autopar.ir.node import TensorType

from .op_families import family_of


def working_dtype(operations: Sequence[tuple[str, Sequence[TensorType], TensorType]]) -> torch.dtype:
    """:func:`products_dtype`; without any products, the dtype in which most elements of parameters are read."""
    elements = Counter[torch.dtype]()
    for op, _, result in operations:
        if op == "param":
            elements[result.dtype] += _elements(result)
    return products_dtype(operations) or max(elements, key=elements.__getitem__, default=torch.float32)


def products_dtype(operations: Iterable[tuple[str, Sequence[TensorType], TensorType]]) -> torch.dtype | None:
    """The dtype of the operands of most multiplications in products, of ``operations`` (overload name, types of tensor
    operands and of the result, of concrete sizes); None if there are no products.

    An [m, k] by [k, n] product has m k n = sqrt(m k * k n * m n) multiplications: the root of the product of the sizes
    of its two largest operands and its result. An operand that is listed once may be both.
    """
    work = defaultdict[torch.dtype, float](float)
    for op, operands, result in operations:
        if family_of(op).matrix is None:
            continue
        factors = sorted((each for each in operands if each.dtype.is_floating_point), key=_elements)
        if factors:
            work[factors[-1].dtype] += math.sqrt(math.prod(map(_elements, (*factors[-2:][:1], factors[-1], result))))
    return max(work, key=lambda dtype: work[dtype], default=None)


def _elements(kind: TensorType) -> int:
    return int(kind.numel)
