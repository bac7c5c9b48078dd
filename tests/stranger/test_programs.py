"""Programs as users write them, on 1, 2 and 4 ranks, from an installed wheel."""

from __future__ import annotations

import pytest
from stranger_user import Stranger


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_first_program(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/first.py", ranks)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, ()),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
        pytest.param(2, ("stages",), marks=pytest.mark.slow),
        pytest.param(4, ("stages",), marks=pytest.mark.slow),
    ],
)
def test_attributes_that_change(stranger: Stranger, ranks: int, arguments: tuple[str, ...]) -> None:
    stranger.run("programs/changes.py", ranks, arguments=arguments)
