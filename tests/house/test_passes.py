"""Each pass has a test of its own: text in, text out, through one shared ``check``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Functions that are passes but take other arguments than a graph, or give more than one thing back.
FUNCTIONS = {
    "annotate/annotate.py": "annotate",
    "annotate/fold.py": "fold_layers",
    "lower/accumulate_gradients.py": "adding",
    "lower/lower_chunk.py": "lower_chunk",
    "lower/overlap.py": "overlap",
    "lower/split_section.py": "split_section",
    "pipeline/cut.py": "cut",
    "pipeline/microbatch.py": "microbatch",
}


def _passes() -> Iterator[tuple[str, str]]:
    """The file of each pass, and the name of the class or function."""
    for file in sorted((ROOT / "passes").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Pass" for b in node.bases):
                yield str(file.relative_to(ROOT / "passes")), node.name
    yield from FUNCTIONS.items()


def test_the_passes_are_found() -> None:
    assert {"MergeCommon", "SaveActivations", "Recompute"} <= {name for _, name in _passes()}


def test_each_pass_has_its_test() -> None:
    lacking = [said for file, name in _passes() if (said := _lacks(file, name))]
    assert not lacking, "\n".join(lacking)


def _lacks(file: str, name: str) -> str:
    """What is wrong with the test of a pass; nothing if it has one."""
    test = ROOT / "tests" / "passes" / f"test_{Path(file).stem}.py"
    if not test.exists():
        return f"{name} of passes/{file} has no {test.relative_to(ROOT)}; copy test_sink_views.py"
    tree = ast.parse(test.read_text())
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    named = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    checked = "check" in called and name in named
    return "" if checked else f"{test.relative_to(ROOT)} does not check {name}, text in, text out"
