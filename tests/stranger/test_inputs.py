"""What users feed a model on several ranks, right and wrong."""

from __future__ import annotations

import pytest

from tests.stranger.stranger_user import Stranger


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_samples_that_each_rank_reads(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/own_samples.py", ranks)


@pytest.mark.parametrize("arguments", [["later"], ["stages"]])
def test_ranks_that_disagree_all_end_with_a_message(stranger: Stranger, arguments: list[str]) -> None:
    message = "input input: f32[8, 8] on rank 0; f32[6, 8] on rank 1"
    output = stranger.run("programs/ranks_disagree.py", 2, arguments=arguments, error=message)
    assert "InputMismatchError" in output and "model.from_local" in output


@pytest.mark.parametrize("ranks", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_token_ids_out_of_range(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/bad_ids.py", ranks)
