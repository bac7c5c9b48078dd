"""Columns of text, in which the tables of plans are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .page_width import terminal_columns
from .quantities import clip

# Characters of a column at most. Chosen: two of them fit in a line of a wide terminal.
MOST = 60
# Characters below which no column is narrowed. Chosen: shorter texts cannot be distinguished.
LEAST = 8
INDENT = 4  # Characters before each line of a table that is part of another text.


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Lines of aligned text. Each column is as wide as its longest cell, at most :data:`MOST` characters, or less if
    the terminal is narrow. Columns in ``right`` are flush right. An empty header is left out.
    """
    cells = [list(header), *map(list, rows)] if header else list(map(list, rows))
    if not cells:
        return
    widths = [min(MOST, max(len(row[i]) for row in cells)) for i in range(len(cells[0]))]
    _narrow(widths, right)
    for row in cells:
        parts = [
            clip(cell, width).rjust(width) if i in right else clip(cell, width).ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(parts).rstrip()


def _narrow(widths: list[int], right: Sequence[int]) -> None:
    """Narrows the widest columns of text, never those of figures, until a line fits the terminal."""
    room = terminal_columns()
    texts = [i for i in range(len(widths)) if i not in right]
    while room is not None and texts and sum(widths) + 2 * (len(widths) - 1) > room - INDENT:
        widest = max(texts, key=lambda i: widths[i])
        if widths[widest] <= LEAST:
            return
        widths[widest] -= 1
