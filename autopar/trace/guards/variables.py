"""Variables outside of a function that its code names: globals, attributes of imported modules and of classes, and
closures; and the defaults of its arguments."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.content.code_origin import is_library, is_model_code, is_written_by_user

from .values import MISSING

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class Variable:
    """``name`` in a namespace: that of a module or a class, a cell of a closure, or an attribute of a function."""

    label: str
    space: dict[str, Any] | types.CellType | type | Callable[..., Any]
    name: str

    def value(self) -> Any:
        """Its current value, MISSING if it does not exist."""
        return self.get(self.name, MISSING)

    def put(self, value: Any) -> None:
        """Gives it another value; it must exist."""
        if isinstance(self.space, dict):
            self.space[self.name] = value
        elif isinstance(self.space, types.CellType):
            self.space.cell_contents = value
        elif isinstance(self.space, type):
            setattr(self._class_that_has_it(), self.name, value)
        else:
            setattr(self.space, self.name, value)

    @property
    def is_of_library(self) -> bool:
        """Whether it is what the class inherits from a library, which autopar may have replaced for the time being."""
        return isinstance(self.space, type) and not is_written_by_user(self._class_that_has_it())

    def _class_that_has_it(self) -> type:
        assert isinstance(self.space, type)
        return next(kind for kind in self.space.__mro__ if self.name in vars(kind))

    def get(self, name: str, default: Any) -> Any:
        """As :meth:`dict.get`."""
        if isinstance(self.space, dict):
            return self.space.get(name, default)
        if isinstance(self.space, type):
            return next((vars(kind)[name] for kind in self.space.__mro__ if name in vars(kind)), default)
        if not isinstance(self.space, types.CellType):
            return getattr(self.space, name, default)
        try:
            return self.space.cell_contents
        except ValueError:  # Not assigned yet.
            return default


def is_own_code(code: types.CodeType) -> bool:
    """Whether the user wrote it, rather than installed it."""
    return is_model_code(code.co_filename, code.co_name) and not is_library(code.co_filename)


def variables_of(function: types.FunctionType) -> Iterator[Variable]:
    """Yields the variables that the code of ``function``, and of functions defined inside it, names; and its
    defaults."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    yield from _named(function.__code__, function, cells)
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            yield Variable(f"{function.__qualname__}.{name}", function, name)


def variables_of_partial(partial: functools.partial[Any], label: str) -> Iterator[Variable]:
    """Yields the arguments that a partial function already has."""
    for name in ("args", "keywords"):
        if getattr(partial, name):
            yield Variable(f"{label}.{name}", partial, name)


def variables_of_class(kind: type, names: set[str]) -> Iterator[Variable]:
    """Yields the attributes with any of these names of the user's classes among ``kind`` and its bases."""
    for name in dict.fromkeys(name for base in kind.__mro__ if is_written_by_user(base) for name in vars(base)):
        if name in names and not (name.startswith("__") and name.endswith("__")):
            yield Variable(f"{kind.__qualname__}.{name}", kind, name)


def attributes_named(code: types.CodeType) -> set[str]:
    """The names of all attributes that ``code``, and functions defined inside it, read."""
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname in _ATTRIBUTES}
    return names.union(*(attributes_named(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _named(code: types.CodeType, function: types.FunctionType, cells: dict[str, types.CellType]) -> Iterator[Variable]:
    before: Any = MISSING
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":
            continue
        variable: Variable | None = None
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL" and name in function.__globals__:
            variable = Variable(f"{function.__module__}.{name}", function.__globals__, name)
        elif instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE") and name in cells:
            variable = Variable(f"{function.__qualname__}.{name}", cells[name], name)
        elif instruction.opname in _ATTRIBUTES:
            variable = _attribute(before, name)
        before = MISSING if variable is None else variable.value()
        if variable is not None and _may_change(before):
            yield variable
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant, function, cells)


def _attribute(owner: Any, name: str) -> Variable | None:
    """``name`` of one of the user's modules or classes, if that has it."""
    if _is_own_module(owner):
        variable = Variable(f"{owner.__name__}.{name}", vars(owner), name)
    elif isinstance(owner, type) and is_written_by_user(owner):
        variable = Variable(f"{owner.__qualname__}.{name}", owner, name)
    else:
        return None
    return None if variable.value() is MISSING else variable


def _may_change(value: object) -> bool:
    """Whether users may change a variable with that value; not if it is something imported."""
    if isinstance(value, type):
        return is_written_by_user(value)
    return not isinstance(value, (types.ModuleType, types.BuiltinFunctionType))


def _is_own_module(value: object) -> bool:
    file = getattr(value, "__file__", None)
    if not isinstance(value, types.ModuleType) or not isinstance(file, str):
        return False
    return is_model_code(file, "") and not is_library(file)
