"""Columns of text: what the tables of plans print through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .plan_units import clip

MOST = 60


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Lines of aligned text, each column as wide as its longest cell (at most :data:`MOST`); those in ``right`` flush
    right. Without a header the rows alone.
    """
    cells = [list(header), *map(list, rows)] if header else list(map(list, rows))
    if not cells:
        return
    widths = [min(MOST, max(len(row[i]) for row in cells)) for i in range(len(cells[0]))]
    for row in cells:
        parts = [
            clip(cell, width).rjust(width) if i in right else clip(cell, width).ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(parts).rstrip()
