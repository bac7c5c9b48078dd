"""Walks over the modules inside a module, for what looks at all of them at every call.

Torch's own walks hand each module through nested generators, and build its path: with a hundred modules they take as
long as several operations. A :class:`Walk` keeps what it found, and looks whether the tables of all modules still have
the same entries, without a Python loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn

from .modules import BUFFERS, CHILDREN, PARAMETERS

_CHILDREN, _PARAMETERS, _BUFFERS = attrgetter(CHILDREN), attrgetter(PARAMETERS), attrgetter(BUFFERS)
_VALUES = methodcaller("values")


class Walk:
    """What is inside ``module``, as it is at each call of a method; until the next call it keeps what was there. Relies
    on the tables that
    :mod:`autopar.torch_internals.modules` names (2.11)."""

    def __init__(self, module: nn.Module) -> None:
        self._begin(module)

    def _begin(self, module: nn.Module) -> None:
        self._visits: list[nn.Module] = []
        self._prefixes: list[str] = []
        self._visit(module, "")
        self._unique = list(dict.fromkeys(self._visits))
        self._tables = list(map(_CHILDREN, self._visits))
        self._names, self._children = _names(self._tables), _entries(self._tables)
        self._parameters: list[nn.Parameter | None] = []
        self._unique_parameters: list[nn.Parameter] = []
        self._buffer_keys: tuple[list[str], list[int]] = [], []
        self._buffer_names: list[str] = []

    def _visit(self, module: nn.Module, prefix: str) -> None:
        """Visits ``module`` and what is inside: a module with two paths is visited twice."""
        self._visits.append(module)
        self._prefixes.append(prefix)
        for name, child in _CHILDREN(module).items():
            if child is not None:
                self._visit(child, f"{prefix}{name}.")

    def _renew(self) -> None:
        """Walks again if a module has been added, removed, replaced, moved or renamed."""
        tables = list(map(_CHILDREN, self._visits))
        is_same = _same(tables, self._tables) and _same(_entries(tables), self._children)
        if not (is_same and _names(tables) == self._names):
            self._begin(self._visits[0])

    def modules(self) -> Sequence[nn.Module]:
        """What ``module.modules()`` yields, in the same order."""
        self._renew()
        return self._unique

    def parameters(self) -> Sequence[nn.Parameter]:
        """What ``module.parameters()`` yields, in the same order."""
        self._renew()
        found = _entries(map(_PARAMETERS, self._unique))
        if not _same(found, self._parameters):
            self._parameters = found
            self._unique_parameters = list({id(p): p for p in found if p is not None}.values())
        return self._unique_parameters

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers by all of their names, as of ``module.named_buffers(remove_duplicate=False)``."""
        self._renew()
        tables = list(map(_BUFFERS, self._visits))
        keys = _names(tables)
        if keys != self._buffer_keys:
            self._buffer_keys = keys
            self._buffer_names = [f"{p}{key}" for p, table in zip(self._prefixes, tables, strict=True) for key in table]
        named = zip(self._buffer_names, _entries(tables), strict=True)
        return {name: buffer for name, buffer in named if buffer is not None}


def _names(tables: Sequence[Any]) -> tuple[list[str], list[int]]:
    """The names in each of ``tables``, one after the other, and how many each has."""
    return list(chain.from_iterable(tables)), list(map(len, tables))


def _entries(tables: Iterable[Any]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, tables)))


def _same(found: Sequence[object], known: Sequence[object]) -> bool:
    """Whether both hold the same objects."""
    return len(found) == len(known) and all(map(is_, found, known))
