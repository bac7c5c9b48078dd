"""Converts the sizes of torch's tracer (its own sympy functions and symbols) to plain sympy in the graph's symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from autopar.errors import TraceError
from autopar.ir.node import Dim
from autopar.torch_internals.fake_tensors import expression_of
from autopar.torch_internals.fake_tensors import sympy_functions as theirs

_PLAIN: dict[type, Callable[..., sympy.Expr]] = {
    theirs.FloorDiv: lambda a, b: sympy.floor(a / b),
    theirs.CleanDiv: lambda a, b: a / b,
    theirs.CeilDiv: lambda a, b: -sympy.floor(-a / b),
    theirs.Mod: sympy.Mod,
    theirs.PythonMod: sympy.Mod,
    theirs.Max: sympy.Max,
    theirs.Min: sympy.Min,
    theirs.IntTrueDiv: lambda a, b: a / b,
    theirs.FloatTrueDiv: lambda a, b: a / b,
    theirs.FloatPow: lambda a, b: a**b,
    theirs.PowByNatural: lambda a, b: a**b,
    theirs.ToFloat: lambda a: a,
    theirs.Identity: lambda a: a,
    theirs.FloorToInt: sympy.floor,
    theirs.CeilToInt: sympy.ceiling,
    theirs.TruncToInt: sympy.floor,
    theirs.TruncToFloat: sympy.floor,
}


class Expressions:
    """Rewrites expressions of torch's symbols into expressions of the graph's ``names`` for them; caches results."""

    def __init__(self, names: Mapping[sympy.Basic, sympy.Basic]) -> None:
        self._names = names
        self._seen: dict[sympy.Basic, Dim | float] = {}

    def number(self, value: Any) -> Dim | float:
        """``value`` (a number, a torch symbolic number or an expression) as an int, a float or plain
        sympy.
        """
        if isinstance(value, (bool, int, float)):
            return value
        expression = expression_of(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
        if expression not in self._seen:
            self._seen[expression] = _settled(self._plain(expression))
        return self._seen[expression]

    def size(self, value: Any) -> Dim:
        """Like :meth:`number`, for a value known to be an integer."""
        size = self.number(value)
        return int(size) if isinstance(size, float) else size

    def _plain(self, expression: sympy.Basic) -> Any:
        if expression in self._names:
            return self._names[expression]
        if isinstance(expression, sympy.Symbol):
            raise TraceError(f"the size {expression} is known only when the model runs; a graph has fixed shapes")
        if not expression.args:
            return expression
        args = [self._plain(arg) for arg in expression.args]
        rebuild = _PLAIN.get(type(expression))
        if rebuild is None and type(expression).__module__ == theirs.__name__:
            raise TraceError(f"the size {expression} cannot be written as a plain expression of the sizes of inputs")
        return (rebuild or expression.func)(*args)


def _settled(expression: Any) -> Dim | float:
    if not isinstance(expression, sympy.Basic):
        return int(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_number:
        return float(expression)
    return expression
