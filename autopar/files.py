"""Texts in files: a local path, or any URL that fsspec knows (``s3://``, ``gs://``, ``https://``, ``memory://``, ...).

Plans, clusters and pages are such files. A local one is written under another name and renamed, so that readers see all
of it or nothing; object stores do so by themselves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit
from urllib.request import url2pathname

import fsspec

from .errors import OptionsError

FileName = str | os.PathLike[str]
# Where a file can be written to but not replaced: in a folder of someone else, or mounted by itself (in a container).
_IRREPLACEABLE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS, errno.EXDEV)
# Status codes of HTTP for those who have no right to a file. Source: RFC 9110, 15.5.
_FORBIDDEN = (401, 403)
# Those of servers that take no files. Source: RFC 9110, 15.5.6 and 15.6.2.
_READ_ONLY = (405, 501)
# Characters of the message of another library that an error repeats. Chosen: a few lines.
_LONGEST = 300


def is_url(name: FileName) -> bool:
    """Whether ``name`` is a URL: a local path has no ``://``."""
    return "://" in os.fspath(name)


def local_path(name: FileName) -> Path | None:
    """The path of a local file, which may be written ``file://``, with ``~`` expanded; None for other URLs."""
    text = os.fspath(name)
    if text.startswith("file://"):
        return Path(url2pathname(urlsplit(text).path))
    return None if is_url(text) else Path(text).expanduser()


def extension(name: FileName) -> str:
    """``".json"`` of ``"plan.json"`` and of ``"https://host/plan.json?version=2"``."""
    return PurePosixPath(urlsplit(os.fspath(name)).path if is_url(name) else os.fspath(name)).suffix


def sibling(name: FileName, other: str) -> str:
    """The file ``other`` in the folder, or under the URL, in which ``name`` is."""
    path = local_path(name)
    return str(path.with_name(other)) if path is not None else f"{os.fspath(name).rpartition('/')[0]}/{other}"


def exists(name: FileName) -> bool:
    """Whether there is such a file. Raises :class:`OptionsError` if that cannot be found out."""
    path = local_path(name)
    if path is not None:
        return path.is_file()
    with _explained("look for", name):
        system, inside = fsspec.core.url_to_fs(os.fspath(name))
        return bool(system.isfile(inside))


def read_bytes(name: FileName, what: str = "") -> bytes:
    """The content of a file. Errors call it ``what`` (``"the plan "``). Raises :class:`OptionsError`."""
    with _explained(f"read {what}".rstrip(), name):
        path = local_path(name)
        if path is not None:
            return path.read_bytes()
        system, inside = fsspec.core.url_to_fs(os.fspath(name))
        return bytes(system.cat_file(inside))


def read_text(name: FileName, what: str = "") -> str:
    """The content of a file of UTF-8, without the mark that some editors begin one with. Errors call it ``what``.
    Raises :class:`OptionsError`."""
    data = read_bytes(name, what)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {data[error.start]:#04x} at {error.start} is not UTF-8"
        raise OptionsError(f"cannot read {what + ' ' if what else ''}{os.fspath(name)!r}: {found}") from error


def check_folder(name: FileName) -> None:
    """Raises :class:`OptionsError` for a local file that cannot be written since its folder is missing, or since it is
    a folder itself: for those who are about to compute for long what they will write."""
    path = local_path(name)
    if path is None:
        return
    if path.is_dir():
        raise OptionsError(f"cannot write {os.fspath(name)!r}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise OptionsError(f"cannot write {os.fspath(name)!r}: there is no folder {str(path.parent)!r}")


def write_text(name: FileName, text: str) -> None:
    """Writes a file in UTF-8, in place of the one before. Raises :class:`OptionsError`."""
    with _explained("write", name):
        path = local_path(name)
        if path is not None:
            _write_local(path, text.encode())
            return
        system, inside = fsspec.core.url_to_fs(os.fspath(name))
        system.pipe_file(inside, text.encode())


def _write_local(path: Path, data: bytes) -> None:
    """Replaces a file at once where that is possible; a pipe or a device is written to."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    except OSError as error:
        if error.errno not in _IRREPLACEABLE or not path.exists():
            raise
        path.write_bytes(data)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


@contextlib.contextmanager
def _explained(verb: str, name: FileName) -> Iterator[None]:
    """Raises what goes wrong inside as :class:`OptionsError`: every file system of fsspec has errors of its own."""
    try:
        yield
    except Exception as error:
        local = local_path(name) is not None
        if local and not isinstance(error, OSError):
            raise
        reason = getattr(error, "strerror", None) if local else _reason(error, os.fspath(name))
        raise OptionsError(f"cannot {verb} {os.fspath(name)!r}: {reason or _said(error)}") from error


def _reason(error: Exception, url: str) -> str:
    """What is wrong, and what to do about it."""
    protocol = url.partition("://")[0]
    said, status = _said(error), getattr(error, "status", None)
    if isinstance(error, ImportError):
        return f"{protocol}:// needs a package that is not installed ({said})"
    if isinstance(error, FileNotFoundError):
        return "there is no such file, or no such bucket"
    if isinstance(error, PermissionError) or status in _FORBIDDEN:
        return f"no permission ({said}); {protocol}:// takes credentials from its own environment or configuration"
    if isinstance(error, NotImplementedError) or status in _READ_ONLY:
        return f"this file can be read but not written to ({said})"
    if protocol not in fsspec.available_protocols():
        return f"no protocol is called {protocol}://; give a local path, s3://, gs://, https:// or another of fsspec's"
    return said


def _said(error: Exception) -> str:
    """The message of an error, cut to a few lines."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
