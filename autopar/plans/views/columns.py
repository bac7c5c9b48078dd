"""Columns of text: what the tables of plans print through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .page_width import terminal_columns
from .quantities import clip

# Characters of a column at most. Chosen: two of them fit in a line of a wide terminal.
MOST = 60
# Characters below which no column is narrowed. Chosen: less cannot be told apart.
LEAST = 8
INDENT = 4  # What stands before a line where a table is part of another text.


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Lines of aligned text, each column as wide as its longest cell (at most :data:`MOST`, and less where the terminal
    has fewer columns); those in ``right`` flush right. Without a header the rows alone.
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
    """Takes from the widest columns of text, never from figures, until a line fits the terminal."""
    room = terminal_columns()
    texts = [i for i in range(len(widths)) if i not in right]
    while room is not None and texts and sum(widths) + 2 * (len(widths) - 1) > room - INDENT:
        widest = max(texts, key=lambda i: widths[i])
        if widths[widest] <= LEAST:
            return
        widths[widest] -= 1
