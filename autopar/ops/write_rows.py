"""Rows written into a cache, ``autopar.write_rows``: as ``aten.index_copy``, in place where the program runs.

In a graph the operation returns the new cache, as every operation of a graph has values that never change. Lowering
replaces it by its form that writes into its operand, where that is the cache as it rests on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# The name in graphs, and that of the form that writes into its operand.
WRITE_ROWS, WRITE_ROWS_IN_PLACE = "autopar.write_rows.default", "autopar.write_rows_in_place"


def write_rows(cache: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """``cache`` with ``rows`` at the positions ``index`` of ``dim``."""
    return cache.index_copy(dim, index, rows)


def write_rows_in_place(cache: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """:func:`write_rows` into ``cache`` itself."""
    return cache.index_copy_(dim, index, rows)


OPERATIONS: dict[str, Callable[..., Any]] = {WRITE_ROWS: write_rows, WRITE_ROWS_IN_PLACE: write_rows_in_place}
