"""Two trainings that save in one folder: one of them is refused, whichever hosts they run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from autopar import checkpoint
from autopar.errors import CheckpointError
from autopar.runtime import run_local
from autopar.runtime.checkpoint import claim as claims
from autopar.runtime.checkpoint.claim import CLAIM, Claim
from autopar.runtime.checkpoint.stores import store_of

As = Callable[[str], None]


@pytest.fixture
def act_as(monkeypatch: pytest.MonkeyPatch) -> Iterator[As]:
    """Makes this process the training called so, of a host of that name."""
    monkeypatch.setattr(claims, "_CLAIMED", set())

    def act(name: str) -> None:
        monkeypatch.setattr(claims, "_own", lambda: Claim(name, f"host-{name}", 1))

    yield act


def save(folder: Path | str, step: int) -> None:
    checkpoint.save(folder, nn.Linear(2, 2), step=step)


@pytest.mark.parametrize("remote", [False, True])
def test_of_two_hosts_the_later_is_refused(act_as: As, tmp_path: Path, remote: bool) -> None:
    folder = f"memory://{tmp_path.name}/two" if remote else tmp_path
    act_as("first")
    save(folder, 1)
    act_as("second")
    save(folder, 2)  # The first may have been killed.
    act_as("first")
    with pytest.warns(UserWarning, match="another training, process 1 on host-second, has begun to save"):
        save(folder, 3)
    act_as("second")
    with pytest.raises(CheckpointError, match=r"nothing was saved in .*: another training .* 1 on host-first"):
        save(folder, 4)
    act_as("first")
    save(folder, 5)
    assert checkpoint.load(folder, nn.Linear(2, 2)).step == 5


def test_one_that_was_killed_is_followed(act_as: As, tmp_path: Path) -> None:
    for step, name in enumerate(("first", "second", "third")):
        act_as(name)
        save(tmp_path, step)
        save(tmp_path, step)


def test_one_that_comes_back_late_is_refused(act_as: As, tmp_path: Path) -> None:
    """Such as a notebook that saved once, before the training began."""
    act_as("notebook")
    save(tmp_path, 1)
    act_as("training")
    save(tmp_path, 2)
    save(tmp_path, 3)
    act_as("notebook")
    with pytest.raises(CheckpointError, match="another training saves there, process 1 on host-training"):
        save(tmp_path, 4)
    act_as("training")
    save(tmp_path, 5)


def test_a_fork_is_another_training(tmp_path: Path) -> None:
    save(tmp_path, 1)
    here = claims._read(store_of(tmp_path))

    def work(rank: int, world: int) -> bool:
        save(tmp_path, 2)
        there = claims._read(store_of(tmp_path))
        return here is not None and there is not None and there.training != here.training

    assert run_local(work, 1, timeout=60, backend=None) == [True]
    with pytest.warns(UserWarning, match="has begun to save"):
        save(tmp_path, 3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"training": "x"}', '{"training": "x", "refused": 3}', "\udcff"])
def test_what_is_no_claim_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / CLAIM).write_bytes(text.encode(errors="surrogateescape"))
    save(tmp_path, 1)
    assert claims._read(store_of(tmp_path)) == replace(claims._own(), saves=1)
