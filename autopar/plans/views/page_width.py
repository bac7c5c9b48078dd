"""How wide text may be: as wide as the terminal it is printed to, and no wider than reads well.

Text that goes into a file or a pipe has the same width everywhere, so that files of two machines compare.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Columns where no terminal says how many. Chosen: most windows have as many.
WIDTH = 100
# Below this figures have no room beside names; a narrower terminal breaks lines.
# The width of a terminal by tradition (VT100).
LEAST = 80
_FIXED: ContextVar[bool] = ContextVar("_FIXED", default=False)


def terminal_columns() -> int | None:
    """The width of the terminal that standard output is, or None where it is a file, a pipe or a notebook."""
    if _FIXED.get():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, ValueError, OSError):
        return None


def page_width(most: int = WIDTH) -> int:
    """Columns that a line may take: ``most``, or those of the terminal if these are fewer."""
    return max(LEAST, min(most, terminal_columns() or most))


@contextmanager
def fixed_width() -> Iterator[None]:
    """Within it text is as wide as it is in a file."""
    token = _FIXED.set(True)
    try:
        yield
    finally:
        _FIXED.reset(token)
