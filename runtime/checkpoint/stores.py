"""Where checkpoints lie: a local folder, or any URL that fsspec knows (``s3://``, ``gs://``, ``memory://``, ...).

A local folder is written under another name, flushed to the disk, and renamed. Object stores have no renaming: there
the manifest, which comes last, is what makes a folder a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import fsspec

Folder = str | os.PathLike[str]


class Store(Protocol):
    """A folder of files. ``renames``: whether a folder inside can be renamed at once."""

    renames: bool

    def __str__(self) -> str: ...

    def inside(self, name: str) -> Store:
        """The folder ``name`` of this one."""

    def create(self) -> None:
        """Creates the folder, if it is not there."""

    def names(self) -> list[str]:
        """The names of what the folder has in it; empty if there is no such folder."""

    def size(self, name: str) -> int:
        """The bytes of a file. Raises ``OSError`` if it is not there."""

    def read(self, name: str, begin: int = 0, length: int | None = None) -> bytes:
        """The ``length`` bytes of a file from ``begin`` on. Raises ``OSError``."""

    def read_into(self, name: str, begin: int, buffer: memoryview) -> int:
        """Fills ``buffer`` from byte ``begin`` of a file on; returns how many bytes there were. Raises ``OSError``."""

    def writing(self, name: str) -> Any:
        """A context in which a new file is written; it is on the disk when the context ends."""

    def flush(self) -> None:
        """Makes the names of the folder's files, and of the folders inside, as lasting as their content."""

    def rename(self, name: str, new: str) -> None:
        """Renames a folder inside."""

    def remove(self, name: str, first: str) -> None:
        """Deletes a folder inside: its file ``first`` before the others, if it is there."""


class LocalStore:
    """A folder of a local or mounted file system."""

    renames = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def inside(self, name: str) -> LocalStore:
        return LocalStore(self._path / name)

    def create(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._path)) if self._path.is_dir() else []

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def read(self, name: str, begin: int = 0, length: int | None = None) -> bytes:
        with open(self._path / name, "rb", buffering=0) as file:
            file.seek(begin)
            return file.readall() if length is None else _exactly(file, length)

    def read_into(self, name: str, begin: int, buffer: memoryview) -> int:
        filled = 0
        with open(self._path / name, "rb", buffering=0) as file:
            file.seek(begin)
            # One read of a file returns at most 2 GiB.
            while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
                filled += count
        return filled

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        with open(self._path / name, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def flush(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, name: str, new: str) -> None:
        os.rename(self._path / name, self._path / new)

    def remove(self, name: str, first: str) -> None:
        (self._path / name / first).unlink(missing_ok=True)
        shutil.rmtree(self._path / name)


def _exactly(file: IO[bytes], length: int) -> bytes:
    """Up to ``length`` bytes."""
    pieces = []
    while length > 0 and (piece := file.read(length)):
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class RemoteStore:
    """A folder of a file system of fsspec."""

    renames = False

    def __init__(self, system: Any, path: str, url: str) -> None:
        self._system, self._path, self._url = system, path.rstrip("/"), url.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def inside(self, name: str) -> RemoteStore:
        return RemoteStore(self._system, self._file(name), f"{self._url}/{name}")

    def _file(self, name: str) -> str:
        return f"{self._path}/{name}"

    def create(self) -> None:
        """Folders of object stores exist once a file is in them."""

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            listed = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in listed} - {""})

    def size(self, name: str) -> int:
        self._system.invalidate_cache()
        return int(self._system.size(self._file(name)))

    def read(self, name: str, begin: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = None if length is None else begin + length
        return bytes(self._system.cat_file(self._file(name), start=begin, end=end))

    def read_into(self, name: str, begin: int, buffer: memoryview) -> int:
        content = self.read(name, begin, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        with self._system.open(self._file(name), "wb") as file:
            try:
                yield file
            except BaseException:
                getattr(file, "discard", lambda: None)()
                raise

    def flush(self) -> None:
        """An object is lasting once it is written."""

    def rename(self, name: str, new: str) -> None:
        raise NotImplementedError("object stores have no renaming")

    def remove(self, name: str, first: str) -> None:
        if self._system.exists(f"{self._file(name)}/{first}"):
            self._system.rm_file(f"{self._file(name)}/{first}")
        self._system.rm(self._file(name), recursive=True)


def store_of(folder: Folder) -> Store:
    """The store of a path, or of a URL. Raises ``ImportError`` if the URL needs a package that is not there."""
    text = os.fspath(folder)
    if "://" not in text:
        return LocalStore(Path(text))
    if text.startswith("file://"):
        return LocalStore(Path(text.removeprefix("file://")))
    system, path = fsspec.core.url_to_fs(text)
    return RemoteStore(system, path, text)
