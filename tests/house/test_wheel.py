"""The wheel holds every module of the four folders, and they import from it alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.built_wheel import build_wheel

from .sources import ROOT, module_files

IMPORT_ALL = """
import importlib, pathlib, sys
site = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(site))
for module in sys.argv[2:]:
    try:
        file = importlib.import_module(module).__file__
    except ModuleNotFoundError as error:  # An integration's library is an extra.
        if module.startswith("autopar.integrations.") and not error.name.startswith("autopar"):
            continue
        raise
    assert pathlib.Path(file).is_relative_to(site), f"{module} came from {file}, not from the wheel"
"""


def data_in_repository() -> set[str]:
    """Paths in the wheel of what is no module: templates, and the mark that the package has types."""
    templates = (ROOT / "autopar").rglob("templates/*")
    return {"autopar/py.typed", *(str(file.relative_to(ROOT)) for file in templates)}


def modules_in_repository() -> dict[str, str]:
    """Path in the wheel -> module name."""
    return {
        module.replace(".", "/") + ("/__init__.py" if file.stem == "__init__" else ".py"): module
        for module, file in module_files().items()
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"))


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == {*modules_in_repository(), *data_in_repository()}


def test_wheel_declares_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "autopar = autopar.command_line:main" in archive.read(name).decode()


def test_wheel_imports_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL, str(site), *modules_in_repository().values()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
