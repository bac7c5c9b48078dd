"""All rules: importing this imports each ``rules_*`` file of the folder, so that none can be forgotten."""

from __future__ import annotations

import importlib
import pkgutil

from . import __path__ as _folder
from .rules import LOCALISERS, RULES

RULE_MODULES = tuple(sorted(m.name for m in pkgutil.iter_modules(_folder) if m.name.startswith("rules_")))
"""The rule files, by module name without the package."""

for _module in RULE_MODULES:
    importlib.import_module(f".{_module}", __package__)

__all__ = ["LOCALISERS", "RULES", "RULE_MODULES"]
