"""The modules of autopar and what they import, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = {"autopar": "autopar", "passes": "autopar.passes", "cost": "autopar.cost", "runtime": "autopar.runtime"}


@dataclass(frozen=True)
class Import:
    """``importer`` imports ``module`` (an absolute name); ``level`` is the number of dots as written."""

    importer: str
    module: str
    level: int
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


def module_files(root: Path = ROOT) -> dict[str, Path]:
    """Module name as installed -> its file."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").parts
            found[".".join((package, *inner)).removesuffix(".__init__")] = path
    return found


def imports_of(module: str, path: Path, known: frozenset[str]) -> Iterator[Import]:
    """The imports of one file, those in functions and for type checkers too; ``from x import y`` names ``x.y`` where
    that is a module."""
    package = package_of(module, path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, 0, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield Import(module, name if name in known else base, node.level, node.lineno)


def package_of(module: str, path: Path) -> str:
    """The package that ``module`` lies in; a package lies in itself."""
    return module if path.stem == "__init__" else module.rpartition(".")[0]


def all_imports(root: Path = ROOT) -> list[Import]:
    """The imports of autopar's own modules by each other."""
    files = module_files(root)
    known = frozenset(files)
    return [found for module, path in files.items() for found in imports_of(module, path, known) if is_ours(found)]


def is_ours(found: Import) -> bool:
    return found.module == "autopar" or found.module.startswith("autopar.")
