"""Which module of a model runs while the model is traced."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from autopar.torch_internals.joint_graphs import notes, set_notes

from .model_state import module_paths
from .patches import every_module
from .record import PATH


class ModuleTracker:
    """Knows which module runs; writes its path on the nodes traced meanwhile, from where torch carries it
    to their backward nodes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = module_paths(model)
        self._running: list[tuple[nn.Module, Any]] = []

    @property
    def modules(self) -> frozenset[int]:
        """Identities of the modules it knows."""
        return frozenset(self._paths)

    @property
    def path(self) -> str:
        """The innermost module that runs, or that ran when an exception left it."""
        return self._paths[id(self._running[-1][0])] if self._running else ""

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if id(module) in self._paths:
            before = notes()
            self._running.append((module, before))
            set_notes({**(before or {}), PATH: self._paths[id(module)]})

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # Modules whose exception was caught by a caller are still listed above this one.
        while any(module is entry for entry, _ in self._running):
            entry, custom = self._running.pop()
            set_notes(custom)
            if entry is module:
                break

    def listening(self) -> AbstractContextManager[None]:
        """Follows the modules."""
        return every_module(self._enter, self._leave)

    def restart(self) -> None:
        """Forgets what ran; torch runs the model more than once."""
        self._running.clear()
