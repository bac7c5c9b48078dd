"""The additive model beside which the order of our prices is judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.published_scores import kendall
from benchmarks.sweep_effects import effects, fitted, line

ROWS: list[dict[str, Any]] = [{"t": t, "p": p, "attention": "flash"} for t in (1, 2, 4) for p in (1, 2)]


def test_effects_of_every_value_but_the_first() -> None:
    design = effects(ROWS)
    assert design.shape == (6, 4) and set(np.unique(design)) == {0.0, 1.0}
    assert np.linalg.matrix_rank(design) == 4


def test_what_is_additive_is_fitted_and_what_is_not_is_left() -> None:
    additive = np.array([0.1 * row["t"] + 0.3 * row["p"] for row in ROWS])
    whole, apart = fitted(effects(ROWS), additive)
    assert whole == pytest.approx(additive) and apart == pytest.approx(additive)
    crossed = additive + np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    whole, apart = fitted(effects(ROWS), crossed)
    assert abs(whole - crossed).max() > 0.1 and apart[-1] == pytest.approx(additive[-1])


def test_a_row_with_a_value_of_its_own_is_not_told_by_others() -> None:
    rows: list[dict[str, Any]] = [*ROWS, {"t": 8, "p": 1, "attention": "flash"}]
    _, apart = fitted(effects(rows), np.arange(7.0))
    assert np.isnan(apart[-1]) and not np.isnan(apart[:-1]).any()


def test_too_few_rows_are_said() -> None:
    found = {"first": "one", "rows": 4, "effects": 3, "ours": kendall([(1, 1), (2, 2)]), "told": 0.5}
    assert line({**found, "told_of_the_others": None}).endswith("ours 1.00, told 0.50, told of the others too few")
