"""The commands, one in each file: the file's name is that of the command, its docstring is the text of ``--help``.

Each is a thin wrapper of the library call of the same name. A new command is a new file.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Protocol, cast

from autopar.cli.output import Output

# The order of ``autopar --help``: from planning to running to the machine; others follow by name.
_FIRST = ("plan", "show", "explain", "diff", "whatif", "verify", "run", "launch", "calibrate", "doctor", "bench")


class Command(Protocol):
    """The interface of a command's module."""

    __name__: str
    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments; ``--json`` is already added."""

    def run(self, arguments: argparse.Namespace, output: Output) -> int:
        """Runs the command; returns its exit status."""


def _place(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


NAMES = tuple(sorted((module.name for module in pkgutil.iter_modules(__path__)), key=_place))
"""The names of all commands."""


def load(name: str) -> Command:
    """The module of a command, imported now: some bring much that others do without."""
    return cast(Command, importlib.import_module(f".{name}", __name__))
