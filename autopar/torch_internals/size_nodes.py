"""Sizes that autopar implements, behind torch's interface of symbolic sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch


class SizeNode(ABC):
    """The implementation of a ``torch.SymInt`` that has no number, or of the ``torch.SymBool`` of a comparison with
    one. Relies on the methods that torch calls on the argument of :class:`torch.SymInt`, those of ``SymNode``
    (2.11)."""

    is_comparison = False

    @abstractmethod
    def compared(self, name: str, other: Any) -> SizeNode:
        """The comparison ``name`` (``eq``, ``lt``, ...) with ``other``."""

    @abstractmethod
    def decided(self) -> bool:
        """Whether the comparison is true; called where it decides what runs."""

    @abstractmethod
    def refuse(self) -> NoReturn:
        """Raises; called for anything else, such as the number."""

    def is_int(self) -> bool:
        return not self.is_comparison

    def is_bool(self) -> bool:
        return self.is_comparison

    def is_float(self) -> bool:
        return False

    is_nested_int = is_constant = is_float

    def is_symbolic(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    def wrap_int(self, number: int) -> int:
        return number

    def __str__(self) -> str:
        return "n"

    _graph_repr = __str__

    def eq(self, other: Any) -> SizeNode:
        return self.compared("eq", other)

    def ne(self, other: Any) -> SizeNode:
        return self.compared("ne", other)

    def gt(self, other: Any) -> SizeNode:
        return self.compared("gt", other)

    def ge(self, other: Any) -> SizeNode:
        return self.compared("ge", other)

    def lt(self, other: Any) -> SizeNode:
        return self.compared("lt", other)

    def le(self, other: Any) -> SizeNode:
        return self.compared("le", other)

    def bool_(self) -> bool:
        return self.decided()

    def guard_bool(self, _file: str, _line: int) -> bool:
        return self.decided()

    def int_(self) -> int:
        self.refuse()

    def guard_int(self, _file: str, _line: int) -> int:
        self.refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args: self.refuse()


def size_of(node: SizeNode) -> torch.SymInt:
    """A size implemented by ``node``. Relies on the constructor of ``torch.SymInt`` (2.11)."""
    return torch.SymInt(node)


def node_of(size: torch.SymInt) -> object:
    """The node that implements ``size``. Relies on ``SymInt.node`` (2.11)."""
    return size.node
