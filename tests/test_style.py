"""Habits of the repository that no linter checks."""

from __future__ import annotations

import ast
import fnmatch
import re
import stat
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_FOLDERS = ("autopar", "passes", "cost", "runtime")
SOURCES = sorted(
    path for folder in (*PACKAGE_FOLDERS, "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
PACKAGE_SOURCES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGE_FOLDERS]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines < 400, f"{name_of(path)} has {lines} lines; split it by the thing each half defines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_bare_import_of_a_folder(path: Path) -> None:
    """``import passes`` finds the folder from a checkout, and loads a second copy of it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    assert [n for n in names if n.split(".")[0] in ("passes", "cost", "runtime")] == []


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=name_of)
def test_module_and_public_definitions_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert (ast.get_docstring(tree) or "TODO").rstrip(".") != "TODO", f"{name_of(path)} has no docstring"
    definitions = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name[0] != "_"]
    undocumented = [
        node.name for node in definitions if not ast.get_docstring(node) and len(ast.unparse(node).splitlines()) > 8
    ]
    assert undocumented == []


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=name_of)
def test_no_catch_all_names(path: Path) -> None:
    assert path.stem not in ("utils", "util", "helpers", "misc", "common")


def test_every_module_has_its_place_in_the_architecture() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().split("| modules | subject |")[1].split("\n\n")[0]
    patterns = [name for row in table.splitlines() for name in re.findall(r"`(.+?)`", "|".join(row.split("|")[:2]))]
    modules = sorted(path.stem for path in (ROOT / "autopar").glob("[!_]*.py"))
    homeless = [name for name in modules if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    assert homeless == [], "name them in the table of modules in docs/architecture.md"
    empty = [pattern for pattern in patterns if not fnmatch.filter(modules, pattern)]
    assert empty == [], "the table of modules names modules that are not there"


def test_every_requirement_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            pins[canonicalize_name(requirement.name)] = specifier.version
    project = PROJECT["project"]
    for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(line)
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(version), f"{line} does not admit the pinned {version}"


def test_packages_are_the_folders() -> None:
    directories = PROJECT["tool"]["setuptools"]["package-dir"]
    assert sorted(directories.values()) == sorted(PACKAGE_FOLDERS)
    assert sorted(directories) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_type_checkers_see_the_folders() -> None:
    """Links, so that a checker reads the file under the name it is imported by."""
    for folder in ("passes", "cost", "runtime"):
        link = ROOT / "typings" / "autopar" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_ci_can_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    for target in ("check", "test"):
        assert f"make {target}" in script.read_text()
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_pre_commit_runs_what_ci_runs() -> None:
    check = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    commands = re.findall(r"\$\(BIN\)/(.+?)(?: \.)?$", check, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert f"entry: .venv/bin/{command}" in hooks


def test_version_is_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog
    assert re.search(rf"^## \[{re.escape(PROJECT['project']['version'])}\]|^## \[Unreleased\]", changelog, re.MULTILINE)
