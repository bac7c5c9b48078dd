"""Which modules a template imports ahead of its copies: installed ones. A user's own module may change during a
session, or have effects when imported that no other process should see; each copy imports it for itself.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from types import ModuleType

_INSTALLED = ("site-packages", "dist-packages")
_declared: set[str] = set()


def import_ahead(*modules: str) -> None:
    """Declares that these modules of the user do not change and have no effects when imported."""
    _declared.update(modules)


def installed_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The installed modules among ``names``, and those that the others refer to in their globals."""
    installed: set[str] = set()
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in seen or module is None or name == "__main__":
            continue
        seen.add(name)
        if name in _declared or is_installed(module):
            installed.add(name)
        else:
            todo += _named_in(module)
    return tuple(sorted(installed))


def _named_in(module: ModuleType) -> set[str]:
    values = list(vars(module).values())
    named = {v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in values}
    return {name for name in named if isinstance(name, str)}


def is_installed(module: ModuleType) -> bool:
    """Whether a module is of an installed package or of Python itself, so that it is the same in every process."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_in_package_folder(file)


@cache
def _is_in_package_folder(file: str) -> bool:
    standard = sysconfig.get_path("stdlib")
    return any(part in file for part in _INSTALLED) or file.startswith(standard)
