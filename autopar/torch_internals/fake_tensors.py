"""Fake tensors, which have no values, and symbolic sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import truediv
from typing import Any

import sympy
import torch

# Torch's own tracer enters it too, for operators whose C++ code would fix a symbolic size (2.11).
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource

# `FakeTensorMode` is documented under "Fake tensor", in this private module; the errors are not (2.11).
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

# Functions that torch adds to sympy: integer division, rounding, minimum and maximum (2.11).
from torch.utils._sympy import functions as sympy_functions

# What computes an expression of sizes by torch's operations on symbolic numbers (2.11).
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "ShapeEnv",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "computed_again",
    "conditions",
    "enable_python_dispatcher",
    "expression_of",
    "hint_of",
    "new_symbol",
    "shape_environment",
    "symbols_among",
    "sympy_functions",
    "without_error_log",
]


def shape_environment() -> ShapeEnv:
    """An environment for symbolic sizes that refuses sizes known only from values. Relies on ``ShapeEnv`` (2.11)."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)


def new_symbol(environment: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """Creates a symbolic size that compares like ``hint``. Relies on ``ShapeEnv.create_symbol`` and
    ``create_symintnode`` (2.11)."""
    source = ConstantSource(name)
    created = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(created, hint=hint, source=source)  # type: ignore[return-value]


def expression_of(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Basic:
    """``number`` in terms of symbols. Relies on ``SymNode.expr`` (2.11)."""
    expression: sympy.Basic = number.node.expr
    return expression


def hint_of(size: torch.SymInt) -> int:
    """The number that ``size`` compares like. Relies on ``SymNode.hint`` (2.11)."""
    return int(size.node.hint)


class _Numbers(PythonReferenceAnalysis):
    """With division, which is one of expressions there."""

    int_truediv = staticmethod(truediv)


def symbols_among(tensors: Iterable[torch.Tensor]) -> dict[sympy.Symbol, torch.SymInt]:
    """The sizes of ``tensors`` that are a symbol, by that. Relies on :func:`expression_of` (2.11)."""
    found: dict[sympy.Symbol, torch.SymInt] = {}
    sizes: Iterable[Any] = chain.from_iterable(tensor.shape for tensor in tensors)  # Whole numbers, say torch's types.
    for size in sizes:
        expression = expression_of(size) if isinstance(size, torch.SymInt) else None
        if isinstance(expression, sympy.Symbol):
            found[expression] = size
    return found


def computed_again(number: torch.SymFloat, sizes: Mapping[sympy.Symbol, torch.SymInt]) -> torch.SymFloat:
    """``number`` computed anew from the ``sizes`` of its symbols, by operations that a tracer records. Torch's tracer
    does that for a number that it has not seen, but for one made from a whole number (``ToFloat``, 2.11 to 2.15).
    Relies on the names of ``sympy_interp`` and ``PythonReferenceAnalysis``."""
    again: torch.SymFloat = sympy_interp(_Numbers, dict(sizes), expression_of(number))
    return again


def conditions(environment: ShapeEnv) -> Iterator[sympy.Basic]:
    """The conditions on symbols that a model's code, or the validity of an operation, has checked. Those from torch's
    fake tensors are left out: there a threshold picks the kernel of a convolution, which a graph does not show. Relies
    on ``ShapeEnv.guards`` and on the text of their ``sloc``, which says where each was made (2.11)."""
    return (guard.expr for guard in environment.guards if "_subclasses/" not in str(guard.sloc))


@contextmanager
def without_error_log() -> Iterator[None]:
    """Stops torch from logging errors of fake tensors, which it raises as well. Relies on the name of the logger
    (2.11)."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled
