"""Programs as users write them, on 1, 2 and 4 ranks, from an installed wheel."""

from __future__ import annotations

import pytest

from tests.stranger.stranger_user import Stranger

# A start of torchrun and of each rank costs seconds: the quick suite has one, of README's first block, and a notebook.
# What the others do is done by tests/runtime in processes of its own.
slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_first_program(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/first.py", ranks)


@slow
@pytest.mark.parametrize(("ranks", "arguments"), [(1, ()), (2, ()), (4, ()), (2, ("stages",)), (4, ("stages",))])
def test_attributes_that_change(stranger: Stranger, ranks: int, arguments: tuple[str, ...]) -> None:
    stranger.run("programs/changes.py", ranks, arguments=arguments)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_loop_of_ones_own_with_changing_calls(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/own_loop.py", ranks)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_models(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/two_models.py", ranks)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fine_tuning(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/finetune.py", ranks)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_hooks_groups_and_averages(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/hooks_and_groups.py", ranks)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_sampler_of_ddp(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/ddp_sampler.py", ranks)


@slow
def test_samples_that_differ_are_named(stranger: Stranger) -> None:
    output = stranger.run("programs/ddp_sampler_unjoined.py", 2, error="InputMismatchError")
    assert "from_local" in output and "not fine" not in output


@pytest.mark.slow
def test_cells_of_a_notebook(stranger: Stranger) -> None:
    stranger.run("programs/notebook.py")


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_epochs_with_partial_batches_evaluation_first_and_targets(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/epochs.py", ranks)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_makes_the_plan(stranger: Stranger, ranks: int) -> None:
    stranger.run("programs/plan_on_every_rank.py", ranks)
