"""Habits of the repository that no linter checks."""

from __future__ import annotations

import ast
import re
import stat
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .sources import FOLDERS, ROOT, module_files

PACKAGE_FOLDERS = tuple(FOLDERS)
SOURCES = sorted(
    path for folder in (*PACKAGE_FOLDERS, "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
PACKAGE_SOURCES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGE_FOLDERS]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    long = {name: lines for name, lines in lengths.items() if lines >= 400}
    assert long == {}, "split them by the things they define"


def test_no_bare_import_of_a_folder() -> None:
    """``import passes`` finds the folder from a checkout, and loads a second copy of it."""
    assert [f"{name_of(path)}: {name}" for path in SOURCES for name in bare_imports(path)] == []


def bare_imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    return [name for name in names if name.split(".")[0] in ("passes", "cost", "runtime")]


def test_modules_and_public_definitions_are_documented() -> None:
    assert [f"{name_of(path)}: {name}" for path in PACKAGE_SOURCES for name in undocumented(path)] == []


def undocumented(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    definitions = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name[0] != "_"]
    bare = [n.name for n in definitions if not ast.get_docstring(n) and len(ast.unparse(n).splitlines()) > 8]
    return [*bare, *(["the module"] if (ast.get_docstring(tree) or "TODO").rstrip(".") == "TODO" else [])]


def test_no_catch_all_names() -> None:
    catch_all = ("utils", "util", "helpers", "misc", "common")
    assert [name_of(path) for path in PACKAGE_SOURCES if path.stem in catch_all] == []


def test_every_requirement_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            pins[canonicalize_name(requirement.name)] = specifier.version
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["dev"], *extras["docs"], *extras["hf"]]:
        requirement = Requirement(line)
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(version), f"{line} does not admit the pinned {version}"


def test_the_wheel_has_every_package() -> None:
    """setuptools leaves out, in silence, a package that is not listed."""
    setuptools = PROJECT["tool"]["setuptools"]
    assert setuptools["package-dir"] == {package: folder for folder, package in FOLDERS.items()}
    packages = [module for module, path in module_files().items() if path.stem == "__init__"]
    assert sorted(setuptools["packages"]) == sorted(packages), "list them under [tool.setuptools] in pyproject.toml"
    folders = {path.parent for path in module_files().values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_type_checkers_see_the_folders() -> None:
    """Links, so that a checker reads the file under the name it is imported by."""
    for folder in ("passes", "cost", "runtime"):
        link = ROOT / "typings" / "autopar" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_ci_can_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    for target in ("check", "docs", "test"):
        assert f"make {target}" in script.read_text()
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_pre_commit_runs_what_ci_runs() -> None:
    check = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    commands = re.findall(r"\$\(BIN\)/(.+?)(?: \.)?$", check, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert f"entry: .venv/bin/{command}" in hooks


def test_one_version_and_one_licence() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECT['project']['version']}\n" in citation
    assert f"\nlicense: {PROJECT['project']['license']}\n" in citation
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()


def test_version_is_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog
    assert re.search(rf"^## \[{re.escape(PROJECT['project']['version'])}\]|^## \[Unreleased\]", changelog, re.MULTILINE)
