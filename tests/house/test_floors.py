"""The floors of the house: who may import whom."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from .floors import PICTURE, ROWS, cycles, drawn, units, violations, wrong_form
from .sources import FOLDERS, Import, all_imports, module_files


@cache
def imports() -> list[Import]:
    """Read once, and not by workers that have other tests."""
    return all_imports()


def test_every_place_has_a_row_and_every_row_a_place() -> None:
    assert sorted(unit for row in ROWS for unit in row) == sorted(set(units().values()))


def test_packages_import_what_is_below_them() -> None:
    assert violations(imports(), units()) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Not in functions or for type checkers either."""
    assert cycles(imports()) == []


def test_relative_inside_a_folder_and_absolute_across() -> None:
    assert wrong_form(imports(), module_files()) == []


def test_folders_can_be_taken_in_at_a_glance() -> None:
    counts = {path.parent: len(list(path.parent.glob("*.py"))) - 1 for path in map(Path, module_files().values())}
    assert {str(folder): count for folder, count in counts.items() if count > 25} == {}


def test_the_picture_is_up_to_date() -> None:
    text = PICTURE.read_text()
    assert drawn(text) == text, "run python -m tests.house.floors"


TREE = {
    "autopar/ir/graph.py": "",
    "autopar/ir/text.py": "",
    "autopar/api.py": "",
    "passes/rules/view.py": "",
    "cost/roofline.py": "",
}
SMALL_ROWS = [["autopar.ir"], ["autopar.cost"], ["autopar.passes.rules", "autopar.passes"], ["autopar.runtime"]]
SMALL_ROWS += [["autopar.api"], ["autopar"]]
VIOLATIONS = {
    "an import upwards": ("autopar/ir/graph.py", "def f():\n    import autopar.api", "floors"),
    "between parts that stay apart": ("passes/rules/view.py", "from autopar.cost.roofline import seconds", "floors"),
    "absolute inside a folder": ("autopar/ir/graph.py", "from autopar.ir.text import parse", "form"),
    "relative across folders": ("passes/rules/view.py", "from ...ir.graph import Graph", "form"),
    "a module imports itself": ("autopar/ir/graph.py", "from .graph import Graph", "cycles"),
    "a circle for type checkers": (
        "autopar/ir/text.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .graph import Graph",
        "cycles",
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_violation_is_found(case: str, tmp_path: Path) -> None:
    """The checks above can fail: each catches its own kind in a small tree."""
    path, code, kind = VIOLATIONS[case]
    sources = {**TREE, **{f"{folder}/__init__.py": "" for folder in FOLDERS}, path: code}
    sources |= {"autopar/ir/__init__.py": "", "passes/rules/__init__.py": ""}
    if case.startswith("a circle"):
        sources["autopar/ir/graph.py"] = "from .text import parse"
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    made = all_imports(tmp_path)
    found = {
        "floors": violations(made, units(tmp_path), SMALL_ROWS),
        "form": wrong_form(made, module_files(tmp_path)),
        "cycles": cycles(made),
    }
    assert len(found[kind]) == 1, found
