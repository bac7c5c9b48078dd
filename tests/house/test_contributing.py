"""The examples of CONTRIBUTING.md are carried out as they stand, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sources import FOLDERS, ROOT

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> dict[str, str]:
    """Title -> text of each section that has a test to run."""
    sections = GUIDE.split("\n## ")[1:]
    return {s.splitlines()[0]: s for s in sections if "python -m pytest " in s and "make check " not in s}


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """(File, text) of each block of a ``kind`` in the examples."""
    for text in examples().values():
        yield from ((file, body) for found, file, body in BLOCK.findall(text) if found == kind)


def changed(text: str, hunk: str) -> str:
    """``text`` with a hunk of context and added lines put in where its context stands."""
    lines = [line for line in hunk.splitlines() if line[:1] in (" ", "+") and not line.startswith("+++")]
    (anchor,) = (line[1:] for line in lines if line[0] == " ")
    assert text.count(f"\n{anchor}\n") == 1, f"{anchor!r} is not in the file exactly once"
    return text.replace(f"\n{anchor}\n", "\n" + "\n".join(line[1:] for line in lines) + "\n")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with all examples in it, laid out as it is installed."""
    copy = tmp_path_factory.mktemp("contributed")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for file, body in blocks("python"):
        assert not (copy / file).exists(), f"{file} is there already"
        (copy / file).write_text(body)
    for _, body in blocks("diff"):
        path = copy / re.findall(r"^\+\+\+ b/(\S+)$", body, re.MULTILINE)[0]
        path.write_text(changed(path.read_text(), body))
    for folder in FOLDERS:
        if folder != "autopar":
            shutil.move(copy / folder, copy / "autopar" / folder)
    return copy


def test_there_are_six() -> None:
    assert len(examples()) == 6


def test_the_examples_fit_the_repository(extended: Path) -> None:
    """What they are put into is there; that they work takes a run of pytest, which is slow."""
    changed_files = [re.findall(r"^\+\+\+ b/(\S+)$", body, re.MULTILINE)[0] for _, body in blocks("diff")]
    assert changed_files
    for file in (*changed_files, *(file for file, _ in blocks("python"))):
        folder = extended if file.startswith(("autopar/", "tests/")) else extended / "autopar"
        compile((folder / file).read_text(), file, "exec")


@pytest.mark.slow
def test_the_examples_work(extended: Path) -> None:
    tests = [shlex.split(body)[3] for _, body in blocks("bash")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--show-capture=no", *tests]
    environment = {**os.environ, "PYTHONPATH": str(extended), "AUTOPAR_CACHE": str(extended / "cache")}
    run = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(tests) == len(examples())
