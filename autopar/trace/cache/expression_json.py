"""Converts expressions and conditions of sympy, with torch's own functions, to plain data and back. Only known
functions are read, and nothing is evaluated as code."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.logic import boolalg

from autopar.torch_internals.fake_tensors import sympy_functions as theirs

_OURS = (
    *(sympy.Add, sympy.Mul, sympy.Pow, sympy.Mod, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min, sympy.Abs),
    *(sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or, sympy.Not, sympy.Piecewise),
)
_THEIRS = (
    *(theirs.FloorDiv, theirs.CleanDiv, theirs.CeilDiv, theirs.Mod, theirs.PythonMod, theirs.Max, theirs.Min),
    *(theirs.IntTrueDiv, theirs.FloatTrueDiv, theirs.FloatPow, theirs.PowByNatural, theirs.ToFloat, theirs.Identity),
    *(theirs.FloorToInt, theirs.CeilToInt, theirs.TruncToInt, theirs.TruncToFloat, theirs.ModularIndexing),
)


def _name(kind: type) -> str:
    return f"torch.{kind.__name__}" if kind.__module__ == theirs.__name__ else kind.__name__


_KINDS = {_name(kind): kind for kind in (*_OURS, *_THEIRS)}


def expression_to_data(expression: Any) -> Any:
    """``expression`` as lists, strings and numbers. Raises ValueError for an unknown function."""
    if isinstance(expression, sympy.Symbol):
        return ["symbol", expression.name]
    if isinstance(expression, (sympy.Integer, sympy.Rational)):
        return ["rational", int(expression.p), int(expression.q)]
    if isinstance(expression, sympy.Float):
        return ["float", repr(float(expression))]
    if isinstance(expression, (boolalg.BooleanTrue, boolalg.BooleanFalse)):
        return ["truth", bool(expression)]
    name = _name(type(expression))
    if _KINDS.get(name) is not type(expression):
        raise ValueError(f"{type(expression)} in {expression}")
    return [name, *map(expression_to_data, expression.args)]


def expression_from_data(data: Any) -> Any:
    """The inverse of :func:`expression_to_data`. Raises ValueError, TypeError or KeyError if it is not one."""
    kind, *args = data
    if kind == "symbol":
        return sympy.Symbol(str(args[0]), positive=True, integer=True)
    if kind == "rational":
        return sympy.Rational(int(args[0]), int(args[1]))
    if kind == "float":
        return sympy.Float(float(args[0]))
    if kind == "truth":
        return sympy.true if args[0] else sympy.false
    return _KINDS[kind](*map(expression_from_data, args))
