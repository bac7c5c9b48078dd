"""Variables outside of a function that its code names: globals, attributes of imported modules, closures."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .guard_values import MISSING
from .trace_errors import is_users

_INSTALLED = ("site-packages", "dist-packages")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class Variable:
    """``name`` in a namespace: that of a module, or a cell of a closure."""

    label: str
    space: dict[str, Any] | types.CellType
    name: str

    def value(self) -> Any:
        """What it is now, MISSING if it is not."""
        return self.get(self.name, MISSING)

    def get(self, name: str, default: Any) -> Any:
        """As :meth:`dict.get`."""
        if isinstance(self.space, dict):
            return self.space.get(name, default)
        try:
            return self.space.cell_contents
        except ValueError:  # Not assigned yet.
            return default


def is_own_code(code: types.CodeType) -> bool:
    """Whether the user wrote it, rather than installed it."""
    return is_users(code.co_filename, code.co_name) and not any(part in code.co_filename for part in _INSTALLED)


def variables_of(function: types.FunctionType) -> Iterator[Variable]:
    """The variables that the code of ``function`` names, and that of functions written within it."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    yield from _named(function.__code__, function, cells)


def _named(code: types.CodeType, function: types.FunctionType, cells: dict[str, types.CellType]) -> Iterator[Variable]:
    before: Any = MISSING
    for instruction in dis.get_instructions(code):
        found: Variable | None = None
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL" and name in function.__globals__:
            found = Variable(f"{function.__module__}.{name}", function.__globals__, name)
        elif instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE") and name in cells:
            found = Variable(f"{function.__qualname__}.{name}", cells[name], name)
        elif instruction.opname in _ATTRIBUTES and _is_own_module(before) and name in vars(before):
            found = Variable(f"{before.__name__}.{name}", vars(before), name)
        before = MISSING if found is None else found.value()
        if found is not None and not isinstance(before, (types.ModuleType, type, types.BuiltinFunctionType)):
            yield found
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant, function, cells)


def _is_own_module(value: object) -> bool:
    file = getattr(value, "__file__", None)
    if not isinstance(value, types.ModuleType) or not isinstance(file, str):
        return False
    return is_users(file, "") and not any(part in file for part in _INSTALLED)
