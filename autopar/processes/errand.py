"""What a process started from the template is sent: an object, pickled once however many processes read it, and the
surroundings in which it was made.
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
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from autopar.errors import WorkerError

from .custom_operations import CustomOperations, custom_operations
from .imports import installed_modules


@dataclass(frozen=True)
class Surroundings:
    """What a fork would have copied and a template does not know: the environment, where modules are found, torch's
    default dtype and random state, and operations that are registered in this process only."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    dtype: torch.dtype
    random_state: torch.Tensor
    operations: CustomOperations

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        return cls(
            dict(os.environ),
            os.getcwd(),
            list(sys.path),
            torch.get_default_dtype(),
            torch.get_rng_state(),
            custom_operations(),
        )

    def enter(self) -> None:
        """Makes them those of this process, for good."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        torch.set_default_dtype(self.dtype)
        torch.set_rng_state(self.random_state)
        self.operations.register()


@dataclass(frozen=True)
class Errand:
    """``modules`` are worth importing once for all who open the file ``descriptor``."""

    descriptor: int
    modules: tuple[str, ...]


@contextmanager
def errand(content: Any) -> Iterator[Errand]:
    """``content``, to be opened by processes that are given the descriptor. Raises :class:`WorkerError` if it cannot be
    pickled."""
    surroundings = Surroundings.here()
    stream = io.BytesIO()
    notes = _Notes(stream)
    try:
        notes.dump(surroundings)
        notes.dump(content)
    except Exception as error:
        raise WorkerError(
            f"what another process is to do cannot be sent to it: {type(error).__name__}: {error}. "
            "Smallest change that works: create objects that cannot be pickled (locks, open files, generators) inside "
            "of the function that is sent"
        ) from error
    with tempfile.TemporaryFile(prefix="autopar-errand-") as file:
        file.write(stream.getbuffer())
        file.flush()
        yield Errand(file.fileno(), installed_modules(notes.modules))


def open_errand(descriptor: int) -> Any:
    """The content, in the surroundings in which it was made."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data, warnings.catch_warnings():
        # Classes that torch has deprecated say so when their objects are made again, as if the user had named them.
        warnings.simplefilter("ignore")
        reader = pickle.Unpickler(data)
        surroundings: Surroundings = reader.load()
        surroundings.enter()
        return reader.load()


class _Notes(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles, and notes whose functions and classes are named."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.modules: set[str] = set()

    def persistent_id(self, thing: Any) -> None:
        if isinstance(thing, ModuleType):
            self.modules.add(thing.__name__)
        elif isinstance(thing, (type, FunctionType, BuiltinFunctionType)):
            self.modules.add(str(thing.__module__))

    def reducer_override(self, thing: Any) -> Any:
        """A module of a class of its own (``torch.ops``, torch's configurations) is imported, like any other."""
        if isinstance(thing, ModuleType) and type(thing) is not ModuleType:
            name = next((name for name, module in list(sys.modules.items()) if module is thing), None)
            if name is not None:
                return importlib.import_module, (name,)
        return super().reducer_override(thing)
