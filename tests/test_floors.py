"""The floors of the house: who may import whom, read from the source by ast."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("autopar", "passes", "cost", "runtime")
UPPER_FLOORS = ("autopar.passes", "autopar.cost", "autopar.runtime")
VOCABULARY = frozenset(
    "autopar." + name
    for name in (
        "cluster",
        "errors",
        "graph",
        "local_ops",
        "optimizers",
        "options",
        "plan",
        "problem",
        "program",
        "chunk",
        "pipeline",
        "stages",
        "reshard",
        "schedule",
        "schedule_check",
        "schedule_messages",
        "schedule_text",
        "schedule_wiring",
        "schedules",
        "signature",
        "spec",
        "text",
        "timeline",
    )
)


@dataclass(frozen=True)
class Import:
    """``importer`` imports ``module`` (an absolute name); ``level`` is the number of dots as written."""

    importer: str
    module: str
    level: int
    line: int
    top_level: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


def module_files(root: Path) -> dict[str, Path]:
    """Module name as installed -> its file, for the four folders."""
    found = {}
    for folder in FOLDERS:
        package = "autopar" if folder == "autopar" else f"autopar.{folder}"
        for path in sorted((root / folder).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def folder_of(module: str) -> str:
    """The installed package a module stands in: ``autopar``, ``autopar.passes``, ..."""
    return next((floor for floor in UPPER_FLOORS if module == floor or module.startswith(floor + ".")), "autopar")


def is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def walk_statements(body: list[ast.stmt], top_level: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it runs when the module is imported."""
    for statement in body:
        yield statement, top_level
        runs = top_level and not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
        runs = runs and not is_type_checking(statement)
        for name in ("body", "orelse", "finalbody"):
            yield from walk_statements(getattr(statement, name, []), runs)
        for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from walk_statements(handler.body, runs)


def imports_of(module: str, path: Path, known: frozenset[str]) -> Iterator[Import]:
    """The imports of one file; ``from x import y`` names ``x.y`` where that is a module."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for statement, top_level in walk_statements(ast.parse(path.read_text()).body):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield Import(module, alias.name, 0, statement.lineno, top_level)
        elif isinstance(statement, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - statement.level + 1] if statement.level else []
            base = ".".join([*above, *filter(None, [statement.module])])
            for alias in statement.names:
                name = f"{base}.{alias.name}"
                target = name if name in known else base
                yield Import(module, target, statement.level, statement.lineno, top_level)


def all_imports(root: Path = ROOT) -> list[Import]:
    files = module_files(root)
    known = frozenset(files)
    return [found for module, path in files.items() for found in imports_of(module, path, known)]


def is_ours(module: str) -> bool:
    return module == "autopar" or module.startswith("autopar.")


def is_face(module: str) -> bool:
    """Whether it composes the floors (tracing, solving, the public calls), so that no floor may know it."""
    name = module.removeprefix("autopar.")
    parts = ("api", "cli", "doctor", "trace", "solve", "search")
    return module == "autopar" or (folder_of(module) == "autopar" and name.startswith(parts))


def vocabulary(imports: list[Import]) -> frozenset[str]:
    """The vocabulary and what it is made of: everything it imports within autopar/, deferred imports too."""
    graph = networkx.DiGraph((f.importer, f.module) for f in imports if folder_of(f.module) == "autopar")
    reached = (networkx.descendants(graph, module) for module in VOCABULARY if module in graph)
    return VOCABULARY.union(*reached) - {module for module in graph if is_face(module)}


def upward_from_vocabulary(imports: list[Import]) -> list[str]:
    """Vocabulary, or what it is made of, that imports an upper floor or the face."""
    words = vocabulary(imports)
    return [
        str(found)
        for found in imports
        if found.importer in words and (folder_of(found.module) in UPPER_FLOORS or is_face(found.module))
    ]


def across_upper_floors(imports: list[Import]) -> list[str]:
    """passes, cost and runtime importing each other, or anything of autopar/ but vocabulary."""
    words = vocabulary(imports)
    return [
        str(found)
        for found in imports
        if folder_of(found.importer) in UPPER_FLOORS
        and is_ours(found.module)
        and folder_of(found.module) != folder_of(found.importer)
        and found.module not in words
    ]


def wrong_form(imports: list[Import]) -> list[str]:
    """Absolute imports inside a folder, relative ones across folders."""
    return [
        f"{found}: {'absolute inside a folder' if found.level == 0 else 'relative across folders'}"
        for found in imports
        if is_ours(found.module) and (folder_of(found.importer) == folder_of(found.module)) == (found.level == 0)
    ]


def cycles(imports: list[Import]) -> list[list[str]]:
    """Rings of modules that import each other when imported."""
    graph = networkx.DiGraph()
    graph.add_edges_from((f.importer, f.module) for f in imports if f.top_level and is_ours(f.module))
    rings = [sorted(ring) for ring in networkx.strongly_connected_components(graph) if len(ring) > 1]
    return rings + [[module] for module in networkx.nodes_with_selfloops(graph)]


IMPORTS = all_imports()


def test_vocabulary_imports_only_vocabulary() -> None:
    assert upward_from_vocabulary(IMPORTS) == []


def test_upper_floors_do_not_import_each_other() -> None:
    assert across_upper_floors(IMPORTS) == []


def test_relative_inside_a_folder_and_absolute_across() -> None:
    assert wrong_form(IMPORTS) == []


def test_no_import_cycles() -> None:
    assert cycles(IMPORTS) == []


def test_every_folder_is_flat_and_a_package() -> None:
    for folder in FOLDERS:
        inner = [path for path in (ROOT / folder).iterdir() if path.is_dir() and path.name != "__pycache__"]
        assert inner == [], f"a sub-package of {folder} would be silently absent from the wheel"
        assert (ROOT / folder / "__init__.py").is_file()


def test_vocabulary_exists() -> None:
    assert VOCABULARY - set(module_files(ROOT)) == set()


VIOLATIONS = {
    "vocabulary imports a pass": (
        "autopar/ir/graph.py",
        "from autopar.passes import rules",
        upward_from_vocabulary,
    ),
    "vocabulary by way of another": (
        "autopar/shapes.py",
        "from autopar.cost import compute",
        lambda imports: upward_from_vocabulary([*imports, Import("autopar.ir.graph", "autopar.shapes", 1, 1, True)]),
    ),
    "vocabulary imports the face": (
        "autopar/ir/placements.py",
        "def f():\n    from . import api",
        upward_from_vocabulary,
    ),
    "a pass imports a price": (
        "passes/rule_language/registry.py",
        "from autopar.cost.compute.roofline import roofline",
        across_upper_floors,
    ),
    "a price imports the face": ("cost/compute/roofline.py", "import autopar.api", across_upper_floors),
    "runtime imports by dots": ("runtime/run.py", "from ..passes import rules", across_upper_floors),
    "relative across folders": ("passes/rule_language/registry.py", "from ..graph import Graph", wrong_form),
    "absolute inside a folder": ("autopar/ir/placements.py", "from autopar.ir.graph import Graph", wrong_form),
    "a module imports itself": ("autopar/ir/graph.py", "from .graph import Graph", cycles),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_violation_is_found(case: str, tmp_path: Path) -> None:
    """The checks above can fail: each catches its own kind in a small tree."""
    sources = dict.fromkeys(("autopar/ir/graph.py", "autopar/ir/placements.py", "autopar/api.py"), "")
    sources |= dict.fromkeys(("passes/rule_language/registry.py", "cost/compute/roofline.py", "runtime/run.py"), "")
    sources |= {f"{folder}/__init__.py": "" for folder in FOLDERS}
    path, code, check = VIOLATIONS[case]
    for name, text in {**sources, path: code}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert len(check(all_imports(tmp_path))) == 1


def test_a_cycle_is_found_and_a_deferred_import_is_none(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "autopar/ir/graph.py").write_text("from . import text")
    (tmp_path / "autopar/ir/graph_text.py").write_text("from .graph import Graph")
    assert cycles(all_imports(tmp_path)) == [["autopar.ir.graph", "autopar.ir.graph_text"]]
    (tmp_path / "autopar/ir/graph_text.py").write_text("def f():\n    from .graph import Graph")
    assert cycles(all_imports(tmp_path)) == []
