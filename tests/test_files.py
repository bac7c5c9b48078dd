"""Files by path or URL."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from autopar.errors import OptionsError
from autopar.files import exists, extension, is_url, local_path, read_bytes, read_text, sibling, write_text

from .helpers.http_files import HttpFiles, http_files
from .helpers.s3_bucket import s3_bucket


@pytest.fixture
def memory() -> Iterator[str]:
    fsspec.filesystem("memory").store.clear()
    yield "memory://team/plans"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def served() -> Iterator[HttpFiles]:
    pytest.importorskip("aiohttp")
    with http_files() as files:
        yield files


def test_names() -> None:
    assert is_url("s3://b/x") and is_url("file:///x")
    assert not any(map(is_url, ("x", "C:\\x", Path("a/b"))))
    assert local_path("file:///a/b") == Path("/a/b") == local_path("/a/b")
    assert local_path(Path("/a folder/b%").as_uri()) == Path("/a folder/b%")
    assert local_path("~/x") == Path.home() / "x"
    assert local_path("https://host/x") is None
    assert [extension(n) for n in ("a.json", "s3://b/a.json", "https://h.org/a.json?v=1.2", "https://h.org/a")] == [
        *([".json"] * 3),
        "",
    ]
    assert sibling("s3://b/c/x.toml", "y.toml") == "s3://b/c/y.toml"
    assert sibling("c/x.toml", "y.toml") == "c/y.toml"


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_a_text_is_read_as_it_was_written(kind: str, tmp_path: Path, memory: str) -> None:
    folder = {"path": str(tmp_path), "file": f"file://{tmp_path}", "memory": memory}[kind]
    name = f"{folder}/plan.txt"
    assert not exists(name)
    for text in ("first\r\nline ↳", "second"):
        write_text(name, text)
        assert (read_text(name), read_bytes(name), exists(name)) == (text, text.encode(), True)
    write_text(name, "\ufefffirst")
    assert read_text(name) == "first", "the mark of an editor is none of the text"
    if kind != "memory":
        assert os.listdir(tmp_path) == ["plan.txt"], "nothing unfinished is left"


def test_a_server_is_read_and_written_to(served: HttpFiles) -> None:
    served.files["/a.txt"] = "ä".encode()
    assert exists(f"{served.url}/a.txt") and not exists(f"{served.url}/b.txt")
    assert read_text(f"{served.url}/a.txt?token=5") == "ä"
    with pytest.raises(OptionsError, match=r"cannot write '.*b.txt': this file can be read but not written to \(405"):
        write_text(f"{served.url}/b.txt", "b")
    served.writable = True
    write_text(f"{served.url}/b.txt", "b")
    assert served.files["/b.txt"] == b"b"


def test_an_object_store() -> None:
    with s3_bucket() as bucket:
        name = f"{bucket}/plans/plan.json"
        assert not exists(name)
        for text in ("first", "second"):
            write_text(name, text)
            assert read_text(name) == text and exists(name)
        with pytest.raises(OptionsError, match=r"cannot write 's3://none/x': there is no such file, or no such bucket"):
            write_text("s3://none/x", "")


def test_what_a_server_refuses_is_said(served: HttpFiles) -> None:
    served.statuses |= {"/secret": 403, "/broken": 500, "/private": 401}
    for path, reason in {
        "/none": "there is no such file",
        "/secret": r"no permission \(403",
        "/private": r"no permission \(401",
        "/broken": "500",
    }.items():
        with pytest.raises(OptionsError, match=rf"cannot read the plan '{served.url}{path}': {reason}"):
            read_text(f"{served.url}{path}", "the plan")
    with pytest.raises(OptionsError, match=r"cannot write .*no permission"):
        write_text(f"{served.url}/secret", "x")


def test_wrong_urls_teach(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionsError, match=r"no protocol is called s4://; give a local path, s3://"):
        read_text("s4://bucket/plan.json")
    with pytest.raises(OptionsError, match="there is no such file"):
        read_text(f"{memory}/none.json")
    missing = {"class": "package_that_is_not_there.System", "err": "Install that_package"}
    monkeypatch.setitem(known_implementations, "needs", missing)
    with pytest.raises(OptionsError, match=r"needs:// needs a package that is not installed \(Install that_package\)"):
        exists("needs://bucket/plan.json")
    with fsspec.filesystem("memory").open(f"{memory}/noise", "wb") as file:
        file.write(b"ab\xff")
    with pytest.raises(OptionsError, match=r"cannot read the plan 'memory://.*': byte 0xff at 2 is not UTF-8"):
        read_text(f"{memory}/noise", "the plan")


def test_local_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"^cannot read the plan 'none.json': No such file or directory$"):
        read_text("none.json", "the plan")
    with pytest.raises(OptionsError, match=r"cannot write '.*none/x': No such file or directory"):
        write_text(tmp_path / "none" / "x", "")
    with pytest.raises(OptionsError, match="Is a directory"):
        write_text(tmp_path, "")


def test_a_file_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_reader_sees_a_whole_file(tmp_path: Path) -> None:
    path, texts, seen = tmp_path / "x", {letter * 1_000_000 for letter in "ab"}, set()
    write_text(path, min(texts))
    done = threading.Event()

    def write() -> None:
        for _ in range(20):
            for text in sorted(texts):
                write_text(path, text)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        seen.add(read_text(path))
    writer.join()
    assert seen <= texts


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "through")
    reader.join()
    assert read == ["through"]


def test_a_file_in_a_folder_of_someone_else_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mounted"
    path.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", refuse)
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["mounted"]
