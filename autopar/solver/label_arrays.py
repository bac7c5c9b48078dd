"""Arrays of labels: small integers that map each choice to a row or column of a price matrix.

numpy's ``unique`` sorts. For labels below a known count, one pass with flags suffices, which is several times faster on
such short arrays.
"""

from __future__ import annotations

import numpy as np

from .problem import Floats, Ints


def used(labels: Ints, count: int) -> Ints:
    """The distinct ``labels``, all below ``count``, in ascending order."""
    flags = np.zeros(count, dtype=bool)
    flags[labels] = True
    return flags.nonzero()[0]


def distinct(labels: Ints, count: int) -> tuple[Ints, Ints]:
    """:func:`used`, and for each of ``labels`` its position there."""
    flags = np.zeros(count, dtype=bool)
    flags[labels] = True
    return flags.nonzero()[0], (flags.cumsum() - 1)[labels]


def equal_rows(table: Floats) -> tuple[Ints, Ints]:
    """For a non-empty ``table`` [rows, columns]: the first row of every set of equal rows, and for each row the
    position of its set."""
    # Adding 0 turns -0 into 0, whose bits differ.
    contiguous = np.ascontiguousarray(table + 0.0)
    seen: dict[bytes, int] = {}
    rows = contiguous.view(f"V{contiguous.itemsize * contiguous.shape[1]}")[:, 0].tolist()
    labels = [seen.setdefault(row, len(seen)) for row in rows]
    if len(seen) == len(rows):
        return (every := np.arange(len(rows))), every
    first = dict(zip(reversed(labels), range(len(rows) - 1, -1, -1), strict=True))
    return np.array([first[label] for label in range(len(seen))]), np.array(labels, dtype=np.int64)
