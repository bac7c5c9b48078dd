"""Versions of Python and torch: those that are supported are named everywhere alike, others are warned of once."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from autopar import supported
from autopar.cli import examine

ROOT = Path(__file__).parents[1]
OTHER_TORCH = """
import torch
torch.__version__ = "{}"
import autopar, autopar.runtime.launch
assert autopar.runtime.launch.run_local(lambda rank, world: rank, 2, timeout=100, backend=None) == [0, 1]
"""


def test_the_project_says_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch" + supported.requirement(supported.TORCH) in project["dependencies"]
    assert project["requires-python"] == supported.requirement(supported.PYTHON)
    minors = range(supported.PYTHON[0][1], supported.PYTHON[1][1])
    named = [c.removeprefix("Programming Language :: Python :: ") for c in project["classifiers"] if "Python ::" in c]
    assert named == [f"3.{minor}" for minor in minors]


def test_the_page_on_inference_names_the_versions_that_are_tested() -> None:
    page = (ROOT / "docs/howto/inference.md").read_text()
    for file in ("constraints.txt", "requirements-newest.txt"):
        found = re.search(r"^transformers==(\d+\.\d+)", (ROOT / file).read_text(), re.M)
        assert found and re.search(rf"run with transformers [^\n]*\b{re.escape(found[1])}\b", page), file


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0+cu132", "2.15.1.dev20261101"])
def test_supported_versions_are_used_in_silence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        supported.warn_of_other_torch()


@pytest.mark.parametrize("version", ["2.10.2", "2.16.0", "3.0.0"])
def test_another_version_is_warned_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(RuntimeWarning, match=rf"2\.11 to 2\.15, not {version}.*torch>=2\.11,<2\.16"):
        supported.warn_of_other_torch()


@pytest.mark.slow
def test_another_version_is_used_and_warned_of_once() -> None:
    """Also where it starts processes."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER_TORCH.format("2.16.0")], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("autopar supports torch 2.11 to 2.15, not 2.16.0") == 1


def test_the_doctor_says_what_is_supported_and_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    version = examine.importlib.metadata.version
    monkeypatch.setattr(examine.importlib.metadata, "version", lambda n: "2.16.0" if n == "torch" else version(n))
    monkeypatch.setattr(examine.platform, "python_version", lambda: "3.10.4")
    found = {finding.name: finding for finding in examine.examine().findings}
    assert not found["torch"].ok and found["torch"].value == "2.16.0 (supported: 2.11 to 2.15)"
    assert "pip install 'torch>=2.11,<2.16'" in found["torch"].advice
    assert not found["python"].ok and found["python"].value == "3.10.4 (supported: 3.11 to 3.13)"
