"""A connection that breaks for a moment, between replicas that may leave, of which none does."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import LocalSGD, Options, checkpoint
from autopar.runtime import run_local
from autopar.runtime.averaging.agreed_rounds import _MOST_VAIN, AgreedRounds
from autopar.runtime.averaging.mean import WholeMean
from autopar.runtime.averaging.replicas import Replicas
from autopar.runtime.checkpoint.ranks import _GROUPS, ranks_of
from autopar.runtime.comm.groups import mesh_groups


def rounds(rank: int, world: int) -> list[float]:
    replicas = Replicas.of(mesh_groups(DeviceMesh("cpu", torch.arange(world).reshape(world, 1))))
    agreed, found = AgreedRounds(replicas, 20.0), []
    for number in range(3 * (_MOST_VAIN + 2)):
        if number % 3 == 1 and rank == 1:
            assert agreed._group is not None
            agreed._group.opened.interrupt()
        values = agreed.begin("lane", WholeMean().start({"": torch.full((9,), float(rank + number))})).wait()
        found.append(values[""].mean().item())
    return found


@pytest.mark.slow
def test_links_that_break_now_and_then_end_no_training() -> None:
    expected = [number + 0.5 for number in range(3 * (_MOST_VAIN + 2))]
    assert run_local(rounds, 2, timeout=200) == [expected] * 2


def saves(rank: int, world: int, folder: str) -> int:
    """Steps 1 to 4, each saved; the connections of the group that saves break before step 2, on one rank."""
    torch.manual_seed(0)
    options = Options(sync=LocalSGD(every=1, patience=20.0))
    model = autopar.parallelize(nn.Linear(4, 4), (2,), options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = checkpoint.Checkpointer(folder, model, optimizer, every=1, keep=9)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, 5):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 and rank == 1:
                for _, _, opened in _GROUPS.values():
                    opened.interrupt()
            saver.save(step)
        saver.finish()
    return sum("in the middle of a checkpoint" in str(each.message) for each in said)


@pytest.mark.slow
def test_a_save_that_breaks_does_not_break_the_next(tmp_path: Path) -> None:
    warned = run_local(partial(saves, folder=str(tmp_path)), 2, timeout=200)
    names = {path.name for path in tmp_path.glob("step-*")}
    # That of the first step may have been in flight.
    assert {"step-000002", "step-000003", "step-000004"} <= names
    assert max(warned) <= 1


def full_disk(rank: int, world: int) -> str:
    """The error of a write that fails on one rank, among replicas that may leave."""
    model = autopar.parallelize(nn.Linear(4, 4), (world,), options=Options(sync=LocalSGD(every=1, patience=20.0)))
    ranks = ranks_of(model)
    assert ranks.may_leave is not None

    def write() -> None:
        if rank == 1:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    try:
        ranks.together(write)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}; {ranks.may_leave.interrupted}"
    except autopar.errors.CheckpointError as error:
        return f"{type(error).__name__}: {error}; {ranks.may_leave.interrupted}"
    return "nothing"


@pytest.mark.slow
def test_a_write_that_fails_is_no_replica_that_left() -> None:
    said = "RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed"
    assert run_local(full_disk, 2, timeout=200) == [f"CheckpointError: rank 1: {said}; False", f"{said}; False"]
