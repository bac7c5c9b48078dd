"""Functions and context variables that are sent to another process as parts of the installed modules they belong to.

A hook that a library makes inside a function cannot be sent by its name, and cloudpickle sends it with copies of the
globals it reads. Copies of what the library's own functions write there (transformers' collector of outputs inside of
layers, which has a context variable) are never written, so that the hook does nothing. It reads the module's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from .imports import is_installed


def home_of(function: FunctionType) -> str | None:
    """The name of the installed module whose globals a function reads; None if they are of no such module."""
    name = str(function.__globals__.get("__name__"))
    module = sys.modules.get(name)
    return name if module is not None and vars(module) is function.__globals__ and _stays(name, module) else None


def with_globals_of(home: str, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What cloudpickle makes a function from, ``reduced``, with the globals of the module ``home`` instead of copies.
    Relies on the order of what it is made from and on the name of its globals (cloudpickle 3)."""
    _, (code, *_, closure), (attributes, state), *rest = reduced
    return _function, (code, home, closure), (attributes, state | {"__globals__": {}}), *rest


def reduced_variable(variable: ContextVar[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What pickle makes a context variable from: the module and name of one of an installed module, whose functions
    read that one there, too; of any other its own name, its default and its value here, if it has them."""
    for home, module in list(sys.modules.items()):
        if _stays(home, module):
            name = next((name for name, value in list(vars(module).items()) if value is variable), None)
            if name is not None:
                return _variable_of, (home, name)
    context = copy_context()
    values = (context[variable],) if variable in context else ()
    return _variable, (variable.name, _default(variable), values)


def _stays(name: str, module: ModuleType) -> bool:
    """Whether another process has the module ``name`` as well: an installed one."""
    return name != "__main__" and is_installed(module) and name not in cloudpickle.list_registry_pickle_by_value()


def _default(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """The default of a context variable, if it has one: its value where none was set."""
    try:
        return (Context().run(variable.get),)
    except LookupError:
        return ()


def _function(code: CodeType, home: str, closure: tuple[Any, ...] | None) -> FunctionType:
    return FunctionType(code, vars(importlib.import_module(home)), None, None, closure)


def _variable_of(home: str, name: str) -> Any:
    return getattr(importlib.import_module(home), name)


def _variable(name: str, default: tuple[Any, ...], values: tuple[Any, ...]) -> ContextVar[Any]:
    made: ContextVar[Any] = ContextVar(name, default=default[0]) if default else ContextVar(name)
    for value in values:
        made.set(value)
    return made
