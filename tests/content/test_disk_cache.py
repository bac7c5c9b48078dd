"""Texts on disk: whole or not there, whatever happens to the folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from autopar.command_line import main
from autopar.content import disk_cache
from autopar.content.disk_cache import read, write
from autopar.runtime.launch import run_local


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "plans"


def test_what_is_written_is_read(folder: Path) -> None:
    assert read("plans", "a") is None
    write("plans", "a", "one\ntwo é\n")
    write("plans", "b", "")
    assert (read("plans", "a"), read("plans", "b"), read("traces", "a")) == ("one\ntwo é\n", "", None)
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("damage", [b"", b"\n", b"garbage", b"\xff\xfe\x00" * 50, b"0" * 64 + b"\ntext"])
def test_foreign_files_are_not_there_and_written_anew(folder: Path, damage: bytes) -> None:
    write("plans", "a", "text")
    (folder / "a.kept").write_bytes(damage)
    assert read("plans", "a") is None
    write("plans", "a", "text")
    assert read("plans", "a") == "text"


def test_every_truncation_and_every_changed_byte_is_noticed(folder: Path) -> None:
    write("plans", "a", "some text")
    whole = (folder / "a.kept").read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            (folder / "a.kept").write_bytes(damaged)
            assert read("plans", "a") is None


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "file"))
    write("plans", "a", "text")
    assert read("plans", "a") is None


def test_a_full_disk_is_no_error_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    write("plans", "a", "text")
    assert list(folder.iterdir()) == []


def test_nothing_is_kept_if_it_is_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("plans", "a", "text")
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    assert read("plans", "a") is None
    write("plans", "b", "text")
    assert [file.name for file in folder.iterdir()] == ["a.kept"]


def test_what_was_not_read_for_longest_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "LIMIT", 3 * (65 + 10))
    for when, key in enumerate("abc"):
        write("plans", key, key * 10)
        os.utime(folder / f"{key}.kept", (when, when))
    assert read("plans", "a") == "a" * 10  # read now: b is the oldest
    write("plans", "d", "d" * 10)
    assert {file.stem for file in folder.iterdir()} == {"a", "c", "d"}


def test_what_dead_writers_left_goes(folder: Path) -> None:
    folder.mkdir()
    for name, age in (("old.part", 0), ("new.part", None)):
        (folder / name).write_text("half")
        if age is not None:
            os.utime(folder / name, (age, age))
    write("plans", "a", "text")
    assert {file.name for file in folder.iterdir()} == {"new.part", "a.kept"}


def _write_and_read(rank: int, world: int) -> None:
    text = "xy"[rank] * 200_000
    for _ in range(40):
        write("plans", "a", text)
        found = read("plans", "a")
        assert found is None or (len(found) == 200_000 and len(set(found)) == 1), found[:80]


def test_two_processes_at_once_see_whole_texts(folder: Path) -> None:
    run_local(_write_and_read, 2, timeout=100)
    assert (read("plans", "a") or "")[:1] in ("x", "y")
    assert not list(folder.glob("*.part"))


def test_doctor_says_what_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("plans", "some", "x" * 3000)
    main(["doctor"])
    said, above = capsys.readouterr().out, folder.parent
    assert f"rm -r {above}/traces {folder} {above}/rules" in said
    assert re.search(r"plans +1 kept, 2\.99 KiB", said) and re.search(r"traces +0 kept, 0 B", said)
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    main(["doctor"])
    assert "off (AUTOPAR_CACHE=off)" in capsys.readouterr().out
