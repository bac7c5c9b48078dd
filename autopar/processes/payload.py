"""What is sent to a process that is started from the template: an object, pickled once however many processes read it,
and the environment in which it was made.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from autopar.errors import WorkerError
from autopar.torch_internals.parametrized import reduced_if_parametrized

from .custom_operations import CustomOperations, custom_operations
from .imports import installed_modules
from .module_globals import home_of, reduced_variable, with_globals_of


@dataclass(frozen=True)
class Environment:
    """What a fork would have copied and a template does not have: the environment variables, the paths of modules,
    torch's default dtype and random state, and operations that are registered in this process only."""

    variables: dict[str, str]
    folder: str
    path: list[str]
    dtype: torch.dtype
    random_state: torch.Tensor
    operations: CustomOperations

    @classmethod
    def current(cls) -> Environment:
        """The environment of this process."""
        return cls(
            dict(os.environ),
            os.getcwd(),
            list(sys.path),
            torch.get_default_dtype(),
            torch.get_rng_state(),
            custom_operations(),
        )

    def enter(self) -> None:
        """Makes it the environment of this process, for good."""
        os.environ.clear()
        os.environ.update(self.variables)
        os.chdir(self.folder)
        sys.path[:] = self.path
        torch.set_default_dtype(self.dtype)
        torch.set_rng_state(self.random_state)
        self.operations.register()


@dataclass(frozen=True)
class Payload:
    """``descriptor`` is of a file with the pickled content; ``modules`` are those that the template should import once
    for all processes which read it."""

    descriptor: int
    modules: tuple[str, ...]


@contextmanager
def payload(content: Any) -> Iterator[Payload]:
    """Pickles ``content`` into a file that processes open by its descriptor. Raises :class:`WorkerError` if it cannot
    be pickled."""
    environment = Environment.current()
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(environment)
        pickler.dump(content)
    except Exception as error:
        raise WorkerError(
            f"the work for another process cannot be sent to it: {type(error).__name__}: {error}. "
            "Smallest change that works: create objects that cannot be pickled (locks, open files, generators) inside "
            "the function that is sent"
        ) from error
    with tempfile.TemporaryFile(prefix="autopar-payload-") as file:
        file.write(stream.getbuffer())
        file.flush()
        yield Payload(file.fileno(), installed_modules(pickler.modules))


def open_payload(descriptor: int) -> Any:
    """Enters the environment in which the content was made, and returns the content."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data, warnings.catch_warnings():
        # Classes that torch has deprecated warn when their objects are unpickled, as if the user had used them.
        warnings.simplefilter("ignore")
        reader = pickle.Unpickler(data)
        environment: Environment = reader.load()
        environment.enter()
        return reader.load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles, and records the modules whose functions and classes are pickled by name."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.modules: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
        elif isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            self.modules.add(str(value.__module__))

    def reducer_override(self, value: Any) -> Any:
        """Pickles a module of a class of its own (``torch.ops``, torch's configurations) as an import, like others,
        layers whose weights are parametrized, which torch refuses, by how they are made, and context variables and
        functions that have no name as parts of their modules."""
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            name = next((name for name, module in list(sys.modules.items()) if module is value), None)
            if name is not None:
                return importlib.import_module, (name,)
        if isinstance(value, ContextVar):
            return reduced_variable(value)
        reduced = reduced_if_parametrized(value) or super().reducer_override(value)
        home = home_of(value) if isinstance(value, FunctionType) and isinstance(reduced, tuple) else None
        if home is None:
            return reduced
        self.modules.add(home)
        return with_globals_of(home, reduced)
