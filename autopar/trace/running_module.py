"""Tracks which module of a model runs while the model is traced."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from autopar.torch_internals.joint_graphs import notes, set_notes

from .model_state import module_paths
from .patches import every_module
from .record import PATH


class ModuleTracker:
    """Tracks the running module, and records its path on the nodes traced in it, which torch copies to their backward
    nodes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = module_paths(model)
        self._running: list[tuple[nn.Module, Any]] = []

    @property
    def paths(self) -> dict[int, str]:
        """The path of each of the model's modules, by id."""
        return self._paths

    @property
    def modules(self) -> frozenset[int]:
        """The ids of the model's modules."""
        return frozenset(self._paths)

    @property
    def path(self) -> str:
        """The path of the innermost module that runs, or that ran when an exception was raised."""
        return self._paths[id(self._running[-1][0])] if self._running else ""

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if id(module) in self._paths:
            before = notes()
            self._running.append((module, before))
            set_notes({**(before or {}), PATH: self._paths[id(module)]})

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # Modules that ended with an exception that a caller caught are still listed above this one.
        while any(module is entry for entry, _ in self._running):
            entry, custom = self._running.pop()
            set_notes(custom)
            if entry is module:
                break

    def listening(self) -> AbstractContextManager[None]:
        """Tracks the modules inside the ``with`` block."""
        return every_module(self._enter, self._leave)

    def restart(self) -> None:
        """Clears the list of running modules; torch runs the model more than once."""
        self._running.clear()
