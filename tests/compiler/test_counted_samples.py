"""Draws that say which dims of their shape count samples, of which a padded batch may have more."""

from __future__ import annotations

import pytest

from autopar.compiler.padded_rows import _counts_samples
from autopar.ir.node import Arg, Node, Value, symbol


@pytest.mark.parametrize(
    ("args", "counts"),
    [
        (((symbol("b"), 4), (0, 1)), True),
        (((symbol("b"), 4), Value("state")), False),  # A value is a tuple, but no pair of numbers.
        (((symbol("b"), 4), (0, 1), Value("state")), True),
        (((symbol("b"), 4, 2),), False),
    ],
)
def test_a_pair_of_numbers_says_so(args: tuple[Arg, ...], counts: bool) -> None:
    assert _counts_samples(Node("draw", "autopar.uniform.default", args)) is counts
