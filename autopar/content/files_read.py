"""Records what code reads from outside of Python while it runs: files, other programs, connections.

Python reports these to audit hooks. Libraries that open files in C or Rust do not (safetensors, ``torch.jit.load``):
code that refers to those is recognised by name (:mod:`.code`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from .code_origin import is_library

_EVENTS = frozenset(("open", "subprocess.Popen", "os.system", "os.exec", "socket.connect", "sqlite3.connect"))
_CODE = (".py", ".pyc", ".so", ".pyd")
_watching: list[list[str]] = []
_this_thread = threading.local()


@contextmanager
def files_read() -> Iterator[list[str]]:
    """Records what any thread opens inside the ``with`` block, but for those that called :func:`ignore_this_thread`.
    Code and files of installed libraries do not count."""
    _install()
    opened: list[str] = []
    _watching.append(opened)
    try:
        yield opened
    finally:
        del _watching[next(i for i, watcher in enumerate(_watching) if watcher is opened)]


def ignore_this_thread() -> None:
    """What this thread opens from now on does not count: it is autopar's own and works beside whatever is watched."""
    _this_thread.ignored = True


@lru_cache(maxsize=1)
def _install() -> None:
    """Installs the audit hook, once: it cannot be removed."""
    sys.addaudithook(_record)


def _record(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or event not in _EVENTS or getattr(_this_thread, "ignored", False):
        return
    name = args[0] if args else ""
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    if event == "open" and (text.endswith(_CODE) or is_library(text)):
        return
    for opened in list(_watching):
        opened.append(f"{event} {text}")
