"""Programs as users write them, on 1, 2 and 4 ranks, from an installed wheel."""

from __future__ import annotations

import pytest
from stranger_user import Stranger


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_first_program(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/first.py", ranks)
