"""The part of :mod:`.objects` for installed libraries: hashes their files and finds user code registered there."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import types
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from .code_origin import file_of, is_library, is_written_by_user

# For packages with more files than this, the sizes of files are hashed, not their text.
# Chosen: reading more files would be felt at every start; not measured.
_READ_FILES = 512
# Their version identifies them, and no user's code is registered there that a model would use.
_WHOLE = frozenset(("torch", "autopar", *sys.stdlib_module_names))


def package_digest(top: str) -> str:
    """A hash of the source files of the package ``top``; "" for torch and Python, which their versions identify."""
    if top in _WHOLE:
        return ""
    files = _files(top)
    return _sizes(top) if len(files) > _READ_FILES else _hash((file, _text(file)) for file in files)


@lru_cache(maxsize=256)
def _files(top: str) -> tuple[str, ...]:
    module = sys.modules.get(top)
    folders = list(getattr(module, "__path__", ()))
    if folders:
        walked = (found for folder in folders for found in os.walk(folder))
        files = (os.path.join(folder, name) for folder, _, names in walked for name in names if name.endswith(".py"))
        return tuple(sorted(files))
    file = str(getattr(module, "__file__", None) or "")
    return (file,) if file.endswith(".py") else ()


@lru_cache(maxsize=256)
def _sizes(top: str) -> str:
    """A hash of the sizes and times of a package's files; cached, since a large package takes a tenth of a second."""
    return _hash((file, _size(file)) for file in _files(top))


def _size(file: str) -> str:
    try:
        stat = os.stat(file)
    except OSError:
        return "unread"
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _text(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return "unread"


def _hash(lines: Iterator[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(repr(line).encode())
    return digest.hexdigest()


def modules_with_registries(names: set[str]) -> list[str]:
    """The modules among ``names`` in which the user's code may be registered."""
    return sorted(
        name for name in names if name.partition(".")[0] not in _WHOLE and is_library(file_of(sys.modules.get(name)))
    )


def registered(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields the user's functions, classes and objects in mappings, lists and objects of a library's module."""
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ != module.__name__ and not _is_users(value):
            continue
        for item in _users_in(value, 2):
            yield name, item


def _users_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, types.ModuleType):
        return
    if _is_users(value):
        yield value
    elif depth:
        for part in _parts(value):
            yield from _users_in(part, depth - 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type(None), str, bytes, int, float)):
        return []
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    members = [part for kind in kinds if is_library(file_of(kind)) for part in list(vars(kind).values())]
    if not isinstance(value, type):
        with contextlib.suppress(AttributeError):
            members += list(object.__getattribute__(value, "__dict__").values())
    return [part for part in members if isinstance(part, (dict, list))]


def _is_users(value: Any) -> bool:
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return is_written_by_user(value)
