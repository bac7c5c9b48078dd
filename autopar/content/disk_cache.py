"""Caches texts on disk under a hash of everything that they depend on: a folder for each kind, a file for each text.

A file is written under a temporary name and renamed, so readers see all of it or nothing, and two writers do no harm.
Its first line is the hash of the remainder: a file that is truncated, damaged or foreign counts as missing, and is
written anew. A folder that cannot be written to, or a full disk, is not an error. Once all files of a kind exceed
:data:`LIMIT` bytes, the least recently read are deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .cache_folder import cache_folder, caching_enabled

# Bytes. Chosen: little of a disk, and many plans, traces or rules.
LIMIT = 256 * 2**20
_SUFFIX = ".kept"
# Files of writers that died are deleted after a day.
# Chosen: nothing is written for that long.
_ABANDONED_SECONDS = 86_400.0
_log = logging.getLogger(__name__)


def key_of(parts: Iterable[str]) -> str:
    """A hash of texts, of which none can pass for a part of another."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}\n".encode())
    return digest.hexdigest()


def read(kind: str, key: str) -> str | None:
    """The text cached under ``key``, or None."""
    if not caching_enabled():
        return None
    path = _path(kind, key)
    try:
        digest, _, text = path.read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        content = text.decode()
    except (OSError, UnicodeDecodeError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return content


def write(kind: str, key: str, text: str) -> None:
    """Caches ``text`` under ``key``, if the folder can be written to."""
    if not caching_enabled():
        return
    path, data = _path(kind, key), text.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _prune(path)
    except OSError as error:
        _log.debug("nothing is cached in %s: %s", path.parent, error)


def _path(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{key}{_SUFFIX}"


def _prune(newest: Path) -> None:
    """Deletes the least recently read files until the others are within the limit, and what dead writers left."""
    files = []
    for file in newest.parent.iterdir():
        with contextlib.suppress(OSError):
            stat = file.stat()
            files.append((stat.st_mtime, stat.st_size, file))
    now = newest.stat().st_mtime
    total = sum(size for _, size, _ in files)
    for when, size, file in sorted(files, key=lambda entry: entry[:2]):
        is_old_part = file.suffix == ".part" and now - when > _ABANDONED_SECONDS
        if is_old_part or (total > LIMIT and file.suffix == _SUFFIX and file != newest):
            with contextlib.suppress(OSError):
                file.unlink()
            total -= size
