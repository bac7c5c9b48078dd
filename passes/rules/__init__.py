"""Sharding rules of operations, a file for each kind. A new rule goes here; importing the package imports every
file."""

from __future__ import annotations

import importlib
import pkgutil

from autopar.passes.rule_language.registry import LOCALISERS, RULES

RULE_MODULES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""The rule files, by module name without the package."""

for _module in RULE_MODULES:
    importlib.import_module(f".{_module}", __name__)

__all__ = ["LOCALISERS", "RULES", "RULE_MODULES"]
