"""Texts kept on disk under the hash of all that they follow from: one folder for each kind, one file for each text.

A file is written under a temporary name and renamed, so readers see all of it or nothing, and two writers do no harm.
Its first line is the hash of the rest: what is cut off, damaged or foreign counts as not there, and is written anew. A
folder that cannot be written to, or a full disk, is not an error. The files that were not read for longest are deleted
once all of a kind exceed :data:`LIMIT` bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from .cache_folder import cache_folder, keeps_work

# Bytes. Chosen: little of a disk, and many plans, traces or rules.
LIMIT = 256 * 2**20
_SUFFIX = ".kept"
# Files of writers that died are deleted after a day.
# Chosen: nothing is written for that long.
_ABANDONED_SECONDS = 86_400.0
_log = logging.getLogger(__name__)


def read(kind: str, key: str) -> str | None:
    """The text kept under ``key``, or None."""
    if not keeps_work():
        return None
    path = _path(kind, key)
    try:
        digest, _, text = path.read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        found = text.decode()
    except (OSError, UnicodeDecodeError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return found


def write(kind: str, key: str, text: str) -> None:
    """Keeps ``text`` under ``key``, if the folder can be written to."""
    if not keeps_work():
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
        _log.debug("nothing is kept in %s: %s", path.parent, error)


def _path(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{key}{_SUFFIX}"


def _prune(newest: Path) -> None:
    """Deletes what was not read for longest until the rest is within the limit, and what dead writers left."""
    files = []
    for file in newest.parent.iterdir():
        with contextlib.suppress(OSError):
            seen = file.stat()
            files.append((seen.st_mtime, seen.st_size, file))
    now = newest.stat().st_mtime
    left = sum(size for _, size, _ in files)
    for when, size, file in sorted(files, key=lambda one: one[:2]):
        is_old_part = file.suffix == ".part" and now - when > _ABANDONED_SECONDS
        if is_old_part or (left > LIMIT and file.suffix == _SUFFIX and file != newest):
            with contextlib.suppress(OSError):
                file.unlink()
            left -= size
