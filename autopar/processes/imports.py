"""Which modules a template imports ahead of its copies: installed ones. A user's own module may change while a session
goes on, or do something when imported that no other process is to see; each copy imports it for itself.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from types import ModuleType

_INSTALLED = ("site-packages", "dist-packages")
_kept: set[str] = set()


def import_ahead(*modules: str) -> None:
    """Says that these modules of the user's do not change and do nothing when imported."""
    _kept.update(modules)


def installed_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The installed modules among ``names``, and those that the others name in their globals."""
    found: set[str] = set()
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in seen or module is None or name == "__main__":
            continue
        seen.add(name)
        if name in _kept or _is_installed(module):
            found.add(name)
        else:
            todo += _named_in(module)
    return tuple(sorted(found))


def _named_in(module: ModuleType) -> set[str]:
    values = list(vars(module).values())
    named = {v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in values}
    return {name for name in named if isinstance(name, str)}


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _lies_where_packages_do(file)


@cache
def _lies_where_packages_do(file: str) -> bool:
    standard = sysconfig.get_path("stdlib")
    return any(part in file for part in _INSTALLED) or file.startswith(standard)
