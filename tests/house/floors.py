"""The picture of the house: who may import whom (floors.toml), and what each package is for.

python -m tests.house.floors            draws both in docs/architecture.md
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx

from .sources import FOLDERS, ROOT, Import, module_files, package_of

PICTURE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by python -m tests.house.floors -->\n", "<!-- end of what is drawn -->\n"
_DATA = tomllib.loads((Path(__file__).parent / "floors.toml").read_text())
ROWS: list[list[str]] = _DATA["rows"]
APART: list[str] = _DATA["apart"]


def unit_of(module: str, path: Path) -> str:
    """What floors.toml calls the module's place: its package, or the module itself directly in ``autopar``."""
    package = package_of(module, path)
    return module if package == "autopar" else package


def units(root: Path = ROOT) -> dict[str, str]:
    """Module -> its place."""
    return {module: unit_of(module, path) for module, path in module_files(root).items()}


def part_of(unit: str) -> str:
    """Which of the packages that stay apart a place belongs to; "" for none."""
    return next((part for part in APART if unit == part or unit.startswith(part + ".")), "")


def violations(imports: list[Import], places: dict[str, str], rows: list[list[str]] = ROWS) -> list[str]:
    """Imports of a package from its own row or a later one, and between packages that stay apart."""
    row_of = {unit: number for number, row in enumerate(rows) for unit in row}
    wrong = []
    for found in imports:
        unit, target = places[found.importer], places.get(found.module, found.module)
        parts = part_of(unit), part_of(target)
        if unit != target and (row_of[target] >= row_of[unit] or (all(parts) and parts[0] != parts[1])):
            wrong.append(str(found))
    return wrong


def cycles(imports: list[Import]) -> list[list[str]]:
    """Rings of modules that import each other, at whatever time."""
    graph = networkx.DiGraph((found.importer, found.module) for found in imports)
    rings = [sorted(ring) for ring in networkx.strongly_connected_components(graph) if len(ring) > 1]
    return rings + [[module] for module in networkx.nodes_with_selfloops(graph)]


def wrong_form(imports: list[Import], files: dict[str, Path]) -> list[str]:
    """Absolute imports inside a folder, relative ones across folders."""
    homes = {module: package_of(module, path) for module, path in files.items()}
    return [
        f"{found}: {'absolute inside a folder' if found.level == 0 else 'relative across folders'}"
        for found in imports
        if found.module in homes
        and (homes[found.importer] == home(found.module, homes)) == (found.level == 0)
        and found.module != homes[found.importer]
    ]


def home(module: str, homes: dict[str, str]) -> str:
    """The folder a module's file is listed in: of a sub-package, the one around it."""
    return module.rpartition(".")[0] if homes[module] == module else homes[module]


def picture() -> str:
    """The floors from the top down, and a table of packages."""
    rows = (" | ".join(short(unit) for unit in row) for row in reversed(ROWS))
    table = "\n".join(f"| `{folder}/` | {count} | {about} |" for folder, count, about in packages())
    return (
        f"{BEGIN}```\n" + "\n".join(rows) + "\n```\n\n"
        "| folder | modules | what it holds |\n| --- | --- | --- |\n" + f"{table}\n{END}"
    )


def short(unit: str) -> str:
    return unit.removeprefix("autopar.") if unit != "autopar" else "autopar/__init__"


def packages() -> Iterator[tuple[str, int, str]]:
    """Each folder with its number of modules and the first paragraph of its docstring."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("__init__.py")):
            about = ast.get_docstring(ast.parse(path.read_text())) or ""
            count = len([file for file in path.parent.glob("*.py") if file.stem != "__init__"])
            yield str(path.parent.relative_to(ROOT)), count, " ".join(about.split("\n\n")[0].split())


def drawn(text: str) -> str:
    """``text`` of docs/architecture.md with the picture as it is now."""
    before, rest = text.split(BEGIN)
    return before + picture() + rest.split(END)[1]


if __name__ == "__main__":
    PICTURE.write_text(drawn(PICTURE.read_text()))
