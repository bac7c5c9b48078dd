"""Which variants of a test with parameters the quick suite runs, and what only some versions of torch can do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch.distributed as dist

needs_groups_in_order = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="torch sorts the ranks of a group (2.11)"
)


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` of one parameter; those that are not among ``quick`` are slow."""
    quick, values = list(quick), list(values)
    assert all(value in values for value in quick), "no such variant"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_rows_but(quick: Iterable[int], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """``rows`` of several parameters; those that are not at the ``quick`` places are slow."""
    places, rows = set(quick), list(rows)
    assert places < set(range(len(rows))), "no such variant"
    return [row if at in places else pytest.param(*row, marks=pytest.mark.slow) for at, row in enumerate(rows)]
