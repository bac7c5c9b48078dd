"""Arrays of labels, against the plain definitions."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.solver.label_arrays import distinct, equal_rows, used


@pytest.mark.parametrize("seed", range(5))
def test_distinct_labels_are_numpys(seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 9, size=12)
    values, position = np.unique(labels, return_inverse=True)
    assert used(labels, 9).tolist() == values.tolist()
    found, at = distinct(labels, 9)
    assert (found.tolist(), at.tolist()) == (values.tolist(), position.tolist())


@pytest.mark.parametrize("kinds", [1, 2, 3, 50])
def test_equal_rows_are_numbered_as_they_come(kinds: int) -> None:
    """With 50 values nearly all rows differ, and with one all are equal."""
    table = np.random.default_rng(kinds).integers(0, kinds, size=(20, 3)).astype(np.float64)
    rows = [tuple(row) for row in table.tolist()]
    first, labels = equal_rows(table)
    seen = list(dict.fromkeys(rows))
    assert first.tolist() == [rows.index(row) for row in seen]
    assert labels.tolist() == [seen.index(row) for row in rows]


def test_zeros_of_both_signs_are_equal() -> None:
    first, labels = equal_rows(np.array([[0.0, 1.0], [-0.0, 1.0], [2.0, 1.0]]))
    assert (first.tolist(), labels.tolist()) == ([0, 2], [0, 0, 1])
