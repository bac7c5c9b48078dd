"""What users feed a model on several ranks, right and wrong."""

from __future__ import annotations

import pytest

from tests.stranger.stranger_user import Stranger

# tests/runtime/test_rank_local.py, test_ranks_agree.py and tests/ops/test_index_range.py are quick ones of these kinds.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_samples_that_each_rank_reads(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/own_samples.py", ranks)


@pytest.mark.parametrize("arguments", [["later"], ["stages"]])
def test_ranks_that_disagree_all_end_with_a_message(stranger: Stranger, arguments: list[str]) -> None:
    message = "input input: f32[8, 8] on rank 0; f32[6, 8] on rank 1"
    output = stranger.run("programs/ranks_disagree.py", 2, arguments=arguments, error=message)
    assert "InputMismatchError" in output and "model.from_local" in output


@pytest.mark.parametrize("ranks", [1, 4])
def test_token_ids_out_of_range(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/bad_ids.py", ranks)
