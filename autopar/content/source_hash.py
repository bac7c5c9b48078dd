"""Identifies the code that makes traces and plans: autopar's own sources, and versions of what it relies on."""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .code_origin import own_folders


@lru_cache(maxsize=1)
def own_sources() -> str:
    """A hash of the text of every module of autopar, so that edited code never reads what earlier code cached."""
    digest = hashlib.sha256()
    for package, folder in own_folders().items():
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(f"{package}/{file.relative_to(folder)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def code_version() -> str:
    """The versions of autopar, Python, torch and the solvers."""
    solvers = ", ".join(f"{name} {_version(name)}" for name in ("ortools", "numpy", "sympy", "networkx"))
    return f"autopar {own_sources()}, python {sys.version}, torch {torch.__version__}, {solvers}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"
