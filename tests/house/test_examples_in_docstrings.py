"""Examples in docstrings are run, so that none of them is out of date."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from .sources import module_files


def has_examples(path: Path) -> bool:
    return ">>> " in path.read_text()


@pytest.mark.parametrize("module", [name for name, path in module_files().items() if has_examples(path)])
def test_examples_give_what_they_say(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 0
    assert failed == 0
