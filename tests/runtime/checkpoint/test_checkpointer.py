"""A loop that saves beside training, is killed, and goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autopar
from autopar import checkpoint
from autopar.checkpoint import Checkpointer
from autopar.errors import CheckpointError, OptionsError, WorkerError
from autopar.runtime import run_local
from autopar.runtime.checkpoint import save as saving
from autopar.runtime.checkpoint import torch_storage
from tests.helpers.planning import on

from .training import assert_equal, batch_of, parallel, reference

SHARDED: dict[str, Any] = {"zero": 3, "stages": 1}


def slowly(gate: threading.Event) -> Any:
    """Waits in the writing thread until the gate opens."""
    original = saving.write_text

    def write(*arguments: Any) -> Any:
        gate.wait(30)
        return original(*arguments)

    return patch.object(saving, "write_text", write)


def test_what_is_written_beside_training_is_the_state_at_its_step(tmp_path: Path) -> None:
    """Training goes on while the first save is held up: what is loaded is from before. Old ones are deleted."""

    def work(rank: int, world: int) -> list[int]:
        gate, made = threading.Event(), parallel((world,), **SHARDED)
        with Checkpointer(tmp_path, made.model, made.optimizer, scheduler=made.scheduler, every=2, keep=2) as kept:
            assert kept.resume().step == 0
            made.steps(range(2))
            wanted = made.whole()
            with slowly(gate):
                assert kept.step(2, extra=[rank * 0])
                assert not kept.step(3)
                made.steps(range(2, 5))
                assert kept.busy
                gate.set()
                kept.finish()
            again = parallel((world,), **SHARDED)
            found = checkpoint.load(tmp_path, again.model, again.optimizer, scheduler=again.scheduler)
            assert (found.step, found.extra) == (2, [0])
            assert_equal(again.whole(), wanted)
            for step in (6, 8, 8, 10):
                kept.step(step)
        return sorted(int(name[5:]) for name in os.listdir(tmp_path) if name.startswith("step-"))

    assert on(2, work) == [[8, 10]] * 2


def test_errors_of_the_thread_come_with_the_next_call_on_every_rank(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> list[str]:
        def fails(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        told, model, name = [], nn.Linear(600, 600), "write_file"
        kept = Checkpointer(tmp_path, model, every=1)
        for call in (lambda: kept.step(2), kept.finish):
            with patch.object(torch_storage, name, fails if rank else getattr(torch_storage, name)):
                kept.step(1)
                while kept.busy:
                    time.sleep(0.01)
            with pytest.raises(CheckpointError, match=r"rank 1.*No space left") as raised:
                call()
            told.append(str(raised.value))
            kept.finish()
        kept.step(3)
        kept.finish()
        assert kept.resume().step == 3
        return told

    on(2, work)


def test_options_are_checked(tmp_path: Path) -> None:
    for wrong in ({"every": 0}, {"every": 2.0}, {"every": 1, "keep": 0}):
        with pytest.raises(OptionsError, match="give an int from 1 on"):
            Checkpointer(tmp_path, nn.Linear(1, 1), **wrong)  # type: ignore[arg-type]


def epoch(folder: Path, rank: int, until: int, killed_at: int | None = None, during: int = 0) -> list[float]:
    """Trains on the model's sampler until a step; is killed there on one rank, some milliseconds into the next one."""
    model = autopar.parallelize(reference(), autopar_mesh(), options=autopar.Options(seed=3, **SHARDED))
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    data = torch.cat([batch_of(number) for number in range(6)])
    sampler = model.sampler(len(data), batch_size=8, shuffle=True, seed=1)
    losses = []
    with Checkpointer(folder, model, optimizer, dataloader=sampler, every=2, keep=2) as kept:
        found = kept.resume()
        step, losses = found.step, list(found.extra or [])
        while step < until:
            sampler.set_epoch(step // len(sampler))
            for indices in DataLoader(range(len(data)), batch_sampler=sampler):  # type: ignore[arg-type]
                losses.append(float(model.step(*sampler.from_local(data[indices]))))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                kept.step(step, extra=losses)
                if step == killed_at and rank == 1:
                    time.sleep(during / 1000)
                    os.kill(os.getpid(), signal.SIGKILL)
                if step >= until:
                    break
    return losses


def autopar_mesh() -> tuple[int, ...]:
    return (int(os.environ["WORLD_SIZE"]),)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [2, 100])
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path, kills: int) -> None:
    """At most one interval of two steps is lost each time; the sampler goes on in the middle of an epoch."""
    until = max(15, 3 * kills // 2)
    wanted = on(2, lambda rank, world: epoch(tmp_path / "whole", rank, until))[0]
    reached = 0
    for kill in range(kills):
        at = min(until, max(reached + 1, (kill + 1) * until // (kills + 1)))
        with pytest.raises(WorkerError):
            run_local(
                lambda rank, _, a=at, k=kill: epoch(tmp_path / "killed", rank, until, a, 3 * k % 40), 2, timeout=120
            )
        reached = newest(tmp_path)
        assert reached >= at - 4, "one interval is lost, or two if the last one was being written"
    for found in on(2, lambda rank, world: epoch(tmp_path / "killed", rank, until)):
        assert found == wanted


def train_until_killed(rank: int, world: int, folder: Path, steps: int, seconds: float) -> None:
    """One process that saves after each step, beside the next one; it is killed so many seconds after so many steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(folder, model, optimizer, every=1, keep=2) as kept, (folder / "losses").open("a") as log:
        first = kept.resume().step
        for step in range(first, 100_000):
            if step == first + steps:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{step} {loss.item()!r}\n")
            log.flush()
            kept.step(step + 1)


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_nothing(tmp_path: Path, kills: int) -> None:
    """Steps that are done again have the losses they had, and few of them are."""
    source, starts = random.Random(0), [0]
    for _ in range(kills):
        with pytest.raises(WorkerError, match="SIGKILL"):
            moment = (source.randint(0, 6), source.uniform(0.0, 0.03))
            run_local(train_until_killed, 1, timeout=60, args=(tmp_path, *moment), backend=None)
        starts.append(len((tmp_path / "losses").read_text().splitlines()))
    lines = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    losses: dict[int, set[str]] = {}
    for step, loss in lines:
        losses.setdefault(int(step), set()).add(loss)
    assert all(len(seen) == 1 for seen in losses.values())
    assert sorted(losses) == list(range(len(losses))) and len(losses) > kills
    lost = [int(lines[at - 1][0]) + 1 - int(lines[at][0]) for at in starts[1:-1] if at < len(lines)]
    assert max(lost) <= 2, "one that was being written, and the one before it"


def newest(folder: Path) -> int:
    return max((int(path.name[5:]) for path in (folder / "killed").glob("step-*")), default=0)
