"""Operations that this process has registered with torch, in a form in which another process can register them too.

An operation of an importable module is registered by importing the module, one of ``torch.library.custom_op`` in a
script or notebook by sending its functions, one of a shared library by loading the library. One that a script defines
through ``torch.library.Library`` cannot be sent: torch does not return its functions.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from dataclasses import dataclass, field

import torch

from autopar.torch_internals.custom_operations import Definition, definition_of, file_that_defined, names_defined

_OURS = ("torch", "autopar")


@dataclass(frozen=True)
class CustomOperations:
    """How another process registers them: modules to import, shared libraries to load, operations to define."""

    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    definitions: tuple[Definition, ...] = field(default=(), repr=False)

    def register(self) -> None:
        """Registers them in this process. One that fails is missing, and a call of it will raise."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for library in self.libraries:
                with contextlib.suppress(OSError):
                    torch.ops.load_library(library)
            for module in self.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
            for definition in self.definitions:
                with contextlib.suppress(Exception):
                    definition.register()


def custom_operations() -> CustomOperations:
    """The operations of this process that neither torch nor autopar defines."""
    modules, definitions = set[str](), list[Definition]()
    for name in names_defined():
        definition = definition_of(name)
        if definition is None:
            modules |= _modules_of(file_that_defined(name))
        elif _can_import(definition.function.__module__):
            modules |= {f.__module__ for f in definition.functions if _can_import(f.__module__)}
        else:
            definitions.append(definition)
    importable = sorted(name for name in modules if name.partition(".")[0] not in _OURS)
    return CustomOperations(tuple(importable), tuple(sorted(torch.ops.loaded_libraries)), tuple(definitions))


def _can_import(module: str) -> bool:
    return module != "__main__" and getattr(sys.modules.get(module), "__spec__", None) is not None


def _modules_of(file: str) -> set[str]:
    """The modules that were imported from ``file``."""
    if not file:
        return set()
    named = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file]
    return {name for name in named if _can_import(name)}
