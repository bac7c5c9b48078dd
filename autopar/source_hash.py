"""What identifies the code that makes traces and plans: autopar's own sources, and versions of what it stands on."""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


@lru_cache(maxsize=1)
def own_sources() -> str:
    """A hash of the text of every module of autopar, so that an edit never meets what the code before it made."""
    import autopar.cost
    import autopar.passes
    import autopar.runtime

    packages = (autopar, autopar.passes, autopar.cost, autopar.runtime)
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.glob("*.py")):
            digest.update(f"{package.__name__}/{file.name}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def code_version() -> str:
    """autopar, Python, torch and the solvers."""
    solvers = ", ".join(f"{name} {_version(name)}" for name in ("ortools", "numpy", "sympy", "networkx"))
    return f"autopar {own_sources()}, python {sys.version}, torch {torch.__version__}, {solvers}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"
