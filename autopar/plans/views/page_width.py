"""The width of text: at most that of the terminal, and at most what reads well.

Text written to a file or a pipe has the same width everywhere, so that files of two machines can be compared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Columns where no terminal says how many. Chosen: most windows have as many.
WIDTH = 100
# Names and figures need at least this width; a narrower terminal breaks lines.
# The width of a terminal by tradition (VT100).
LEAST = 80
_FIXED: ContextVar[bool] = ContextVar("_FIXED", default=False)


def terminal_columns() -> int | None:
    """The width of the terminal, or None if standard output is a file, a pipe or a notebook."""
    if _FIXED.get():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, ValueError, OSError):
        return None


def page_width(most: int = WIDTH) -> int:
    """Columns that a line may take: ``most``, or those of the terminal if it has fewer."""
    return max(LEAST, min(most, terminal_columns() or most))


@contextmanager
def fixed_width() -> Iterator[None]:
    """A context in which text has the width that it has in a file."""
    token = _FIXED.set(True)
    try:
        yield
    finally:
        _FIXED.reset(token)
