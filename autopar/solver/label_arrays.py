"""Arrays of labels: small integers that say which row or column of a price each choice means.

numpy's ``unique`` sorts; for labels below a known count one pass with flags does, several times faster on arrays as
short as these.
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
    return flags.nonzero()[0], (np.cumsum(flags) - 1)[labels]


def equal_rows(table: Floats) -> tuple[Ints, Ints]:
    """Of a ``table`` [rows, columns], at least one of each, the first of every set of equal rows, and for each row the
    position of its set."""
    # Adding 0 makes -0 the same bits as 0.
    whole = np.ascontiguousarray(table + 0.0)
    seen: dict[bytes, int] = {}
    rows = whole.view(f"V{whole.itemsize * whole.shape[1]}")[:, 0].tolist()
    labels = np.array([seen.setdefault(row, len(seen)) for row in rows], dtype=np.int64)
    _, first = np.unique(labels, return_index=True)
    return first, labels
