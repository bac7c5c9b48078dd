"""What a trace follows from besides the model: hooks on every module, files, modules of the user's, libraries."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from autopar.content.feed import Unkeyable
from autopar.content.files_read import files_read
from autopar.trace.cache import cache as trace_cache
from autopar.trace.cache.cache import traced_once
from autopar.trace.cache.key import trace_key
from autopar.trace.capture import Request
from autopar.trace.tracer import Traced, request_for, traced_request


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "traces"


def _request(model: nn.Module) -> Request:
    return request_for(model, (torch.ones(8, 4),), {}, device="cpu", loss_fn=torch.sum)


def test_a_hook_on_every_module_is_not_kept(folder: Path) -> None:
    handle = register_module_forward_hook(lambda module, inputs, output: None)
    try:
        with pytest.raises(Unkeyable, match="of every module"):
            trace_key(_request(nn.Linear(4, 4)))
    finally:
        handle.remove()
    trace_key(_request(nn.Linear(4, 4)))


def _import(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> ModuleType:
    """The package ``name`` in ``folder``, new."""
    for file, text in files.items():
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text(text)
    for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
        sys.modules.pop(loaded)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    return importlib.import_module(name)


_SETTINGS = """import torch
import a_package_of_the_user.settings
class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * a_package_of_the_user.settings.SCALE
"""


def test_a_module_in_a_package_of_the_user_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"__init__.py": "", "settings.py": "SCALE = 1.0\n", "model.py": _SETTINGS}
    package = _import(tmp_path, "a_package_of_the_user", monkeypatch, files)
    model = importlib.import_module("a_package_of_the_user.model").Scaled(4, 4)
    before = trace_key(_request(model))
    monkeypatch.setattr(package.settings, "SCALE", 2.0)
    assert trace_key(_request(model)) != before


def _pixels(file: Path, x: torch.Tensor) -> torch.Tensor:
    return x * len(getattr(Path, "read_" + "bytes")(file))


def test_a_trace_that_reads_a_file_is_not_kept(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "table").write_bytes(b"123")
    # What a library reads, which no name in the user's code tells.
    with files_read() as read:
        _pixels(tmp_path / "table", torch.ones(1))
    assert len(read) == 1 and read[0].endswith("table")

    class Table(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(_read_by_a_library(x))

    with pytest.raises(Unkeyable, match="load"):
        trace_key(_request(Table(4, 4)))


def _read_by_a_library(x: torch.Tensor) -> torch.Tensor:
    return x * torch.load("no such file")


def test_a_file_that_is_read_unseen_is_not_kept(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table").write_bytes(b"123")

    def reading(request: Request) -> Traced:
        _pixels(tmp_path / "table", torch.ones(1))
        return traced_request(request)

    with monkeypatch.context() as patched:
        patched.setattr(trace_cache, "traced_request", reading)
        traced_once(_request(nn.Linear(4, 4)))
        assert not folder.exists()
    traced_once(_request(nn.Linear(4, 4)))
    assert folder.exists()


_LIBRARY = """import torch
FUNCTIONS = {}
class Attention(torch.nn.Linear):
    def forward(self, x):
        from a_library_of_someone import deep
        return FUNCTIONS["mine"](super().forward(x)) * deep.inner()
"""


def test_installed_packages_count_with_all_files_and_what_is_registered_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(constant: str, factor: float) -> str:
        files = {"__init__.py": _LIBRARY, "deep.py": f"def inner():\n    return {constant}\n"}
        library = _import(tmp_path / "site-packages", "a_library_of_someone", monkeypatch, files)
        library.FUNCTIONS["mine"] = lambda x: x * factor
        return trace_key(_request(library.Attention(4, 4)))

    keys = [key("1.0", 1.0), key("1.0", 1.0), key("2.0", 1.0), key("1.0", 3.0)]
    assert keys[0] == keys[1] and len(set(keys)) == 3
